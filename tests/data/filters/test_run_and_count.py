"""The dataset has the kept texts of the documents, and the manifest counts all documents."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.config.test_filters import OUTSIDE
from tests.support.filtered import FILTERS, documents, kept, run, write
from tests.support.megatron_datasets import assert_same_dataset
from tokamake.data.corpus.document_rows import ORDINAL, RowsWriter
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.trace import origin
from tokamake.data.tokenize.encoder import _FAST_THRESHOLD
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError


def test_the_dataset_is_that_of_the_kept_texts(workspace: Path) -> None:
    rows = list(documents(3000))
    raw = write(workspace / "raw.jsonl", rows)
    texts = [text for row in rows if (text := kept(row)) is not None]
    plain = write(workspace / "kept.jsonl", [{"text": text} for text in texts])
    manifest = run(workspace, [raw], "filtered", filters=FILTERS, workers=2)
    expected = run(workspace, [plain], "plain")
    assert_same_dataset(workspace / "filtered", workspace / "plain")
    assert 100 < len(texts) < 1500
    assert manifest["documents"] == expected["documents"] == len(texts)
    assert manifest["filtered_documents"] == len(rows) - len(texts)
    assert manifest["documents_in"] == len(rows)
    assert manifest["text_bytes"] == expected["text_bytes"]
    assert not expected.keys() & {"filters", "filtered_documents"}
    length, regex, url, replaced = manifest["filters"]
    short = [row["text"] for row in rows if len(row["text"]) < 50]
    characters = sum(map(len, short))
    sums = {"documents": len(short), "characters": characters, "value": characters}
    assert length["dropped"] == {"number of characters below 50": sums}
    assert length["documents"] == len(rows)
    assert regex["documents"] == len(rows) - len(short)
    assert url["dropped"].keys() == {"number of matches in meta.url above 0"}
    assert replaced["documents"] == len(texts)
    is_kept = [row["text"] for row in rows if kept(row) is not None]
    removed = sum(text.count("é") for text in is_kept)
    assert replaced["changed"] == {
        "documents": sum("é" in text for text in is_kept),
        "characters": removed,
    }
    lines = [number for number, row in enumerate(rows, 1) if kept(row) is not None]
    for document in range(0, len(lines), 97):
        assert origin(workspace / "filtered", document) == f"{raw}: line {lines[document]}"


def test_workers_and_formats_change_no_byte(workspace: Path) -> None:
    rows = list(documents(2000))
    raw = write(workspace / "raw.jsonl", rows)
    packed = workspace / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(raw.read_bytes()))
    table = workspace / "table.parquet"
    parquet.write_table(arrow.Table.from_pylist([*rows]), table)
    filters = run(workspace, [raw], "one", filters=FILTERS, workers=1)["filters"]
    assert run(workspace, [raw], "many", filters=FILTERS, workers=4)["filters"] == filters
    for name, path in (("packed", packed), ("table", table)):
        own = run(workspace, [path], name, filters=FILTERS, workers=4)["filters"]
        for entry, same in zip(own, filters, strict=True):
            # Files of other names have other samples.
            assert entry | {"samples": []} == same | {"samples": []}
    for name in ("many", "packed", "table"):
        assert_same_dataset(workspace / name, workspace / "one")


def test_a_large_file_takes_the_fast_encoder(workspace: Path) -> None:
    size, rows = 0, []
    for row in documents(100_000, seed=4, longest=2000):
        rows.append(row)
        size += len(kept(row) or "")
        if size > 1.5 * _FAST_THRESHOLD:
            break
    raw = write(workspace / "raw.jsonl", rows)
    texts = [{"text": text} for row in rows if (text := kept(row)) is not None]
    manifest = run(workspace, [raw], "filtered", filters=FILTERS)
    run(workspace, [write(workspace / "kept.jsonl", texts)], "plain")
    assert manifest["encoder"].startswith("tokamake")
    assert_same_dataset(workspace / "filtered", workspace / "plain")


def test_bad_lines_duplicates_and_several_keys_stay_exact(workspace: Path) -> None:
    rows = [{"a": f"{number} " * 30, "b": "x" * number} for number in range(100)]
    lines = [json.dumps(row) for row in rows]
    lines[7], lines[50] = "bad", '{"a": 1, "b": ""}'
    (workspace / "raw.jsonl").write_text("\n".join(lines))
    with RowsWriter(workspace / "duplicates") as writer:
        writer.add("two", np.array([[3], [60], [99]], ORDINAL))
    tokenize(
        (str(workspace / "raw.jsonl"),),
        output=workspace / "two",
        tokenizer=workspace / "tokenizer",
        text_key=("a", "b"),
        on_bad_document="quarantine",
        max_bad_fraction=0.1,
        filters="length: {min_characters: 40}",
        empty_documents="keep",
    )
    for key in "ab":
        manifest = read_manifest(workspace / f"two_{key}")
        # A document is dropped if one of its texts is.
        assert (manifest["documents"], manifest["filtered_documents"]) == (59, 39)
        assert (manifest["documents_in"], manifest["quarantined_documents"]) == (100, 2)
    assert origin(workspace / "two_b", 0).endswith("raw.jsonl: line 41")
    assert origin(workspace / "two_b", 10).endswith("raw.jsonl: line 52")


MODEL = '''
from pydantic import PrivateAttr
from tokamake.data.filters import Document, DocumentFilter, Drop

class Filter(DocumentFilter):
    """A stand-in of a classifier: the model is loaded once."""

    threshold: float = 0.5
    """Smallest score."""
    _model: dict[str, float] = PrivateAttr(default_factory=dict)

    def setup(self) -> None:
        print("loading a model")
        self._model["word"] = 1.0

    def apply(self, document: Document) -> Drop | None:
        words = document.text.split()
        score = sum(self._model.get(word, 0.0) for word in words) / max(len(words), 1)
        document.metrics["score"] = score
        return Drop("low score", score) if score < self.threshold else None
'''


def test_a_filter_outside_the_package(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    Path("letters.py").write_text(OUTSIDE)
    Path("model.py").write_text(MODEL)
    rows = [{"text": "word " * 9 + "b"}, {"text": "word a"}, {"text": "word word a"}, {"text": "a"}]
    files = [write(workspace / "raw.jsonl", rows)]
    manifest = run(workspace, files, "out", filters="letters.py: {letter: a}, model.py")
    letters, model = manifest["filters"]
    dropped = {"no such letter": {"documents": 1, "characters": 46}}
    assert (letters["filter"], letters["dropped"]) == ("letters.py", dropped)
    assert len(model["source"]) == 64
    assert model["dropped"] == {"low score": {"documents": 1, "characters": 1, "value": 0.0}}
    assert model["metrics"]["score"] == {"documents": 3, "value": pytest.approx(0.5 + 2 / 3)}
    assert manifest["documents"] == 2
    assert capsys.readouterr().out.count("loading a model") == 1


def test_a_mistake_that_setup_finds_is_one_line(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    raised = "raise UserError('no model; install it')"
    text = MODEL.replace('print("loading a model")', raised)
    Path("lacking.py").write_text(f"from tokamake.errors import UserError\n{text}")
    raw = write(workspace / "raw.jsonl", [{"text": "a"}])
    with pytest.raises(UserError, match=r"^filter lacking\.py: no model; install it$"):
        run(workspace, [raw], "out", filters="lacking.py")


def test_an_empty_document_is_empty_before_any_filter(workspace: Path) -> None:
    """Filters would drop it, by its length and by its address."""
    filters = "length: {min_words: 2}, regex: {field: url, drop: b}"
    texts = ["one two three", "", "short", "four five six", ""]
    rows = [{"text": text, "url": "a" if text else "b"} for text in texts]
    raw = write(workspace / "raw.jsonl", rows)
    skipped = run(workspace, [raw], "skipped", filters=filters)
    assert [skipped[f"{name}documents"] for name in ("", "empty_", "filtered_")] == [2, 2, 1]
    assert [entry["documents"] for entry in skipped["filters"]] == [5, 4]
    run(workspace, [raw], "kept", filters=filters, empty_documents="keep")
    good = [row for row in rows if row["text"] != "short"]
    raw = write(workspace / "good.jsonl", good)
    run(workspace, [raw], "good", empty_documents="keep")
    assert_same_dataset(workspace / "kept", workspace / "good")
    write(raw, [row for row in good if row["text"]])
    run(workspace, [raw], "without")
    assert_same_dataset(workspace / "skipped", workspace / "without")
