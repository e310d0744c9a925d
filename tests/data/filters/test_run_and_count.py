"""The dataset has the kept texts of the documents, and the manifest counts all documents."""

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.config.test_filters import OUTSIDE
from tests.support.megatron_datasets import assert_same_dataset
from tokamake.data.corpus.document_rows import ORDINAL, RowsWriter
from tokamake.data.filters._samples import smallest
from tokamake.data.indexed.describe import describe
from tokamake.data.indexed.manifest import read_manifest, write_manifest
from tokamake.data.indexed.manifest_counts import count_faults, merge_counts, verdicts
from tokamake.data.indexed.merge import merge
from tokamake.data.indexed.trace import origin
from tokamake.data.tokenize.encoder import _FAST_THRESHOLD
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError

FILTERS = (
    "length: {min_characters: 50}, regex: {drop: lorem}, regex: {field: meta.url, drop: bad},"
    "regex: {replace: é}"
)
"""All verdicts, and a field of the raw record."""


def documents(number: int, *, seed: int = 3, longest: int = 60) -> Iterator[dict[str, Any]]:
    """Documents: each filter drops or changes some of them."""
    numbers = random.Random(seed)
    for _ in range(number):
        words = [numbers.choice(["lorem", "ab", "cd", "中", "é"]) for _ in range(3)]
        text = " ".join(words) + " word" * numbers.choice([0, 20, longest])
        yield {"text": text, "meta": {"url": numbers.choice(["bad", "good"])}}


def kept(document: dict[str, Any]) -> str | None:
    """The text that is left of a document, without using tokamake."""
    text: str = document["text"]
    if len(text) < 50 or "lorem" in text or document["meta"]["url"] == "bad":
        return None
    return text.replace("é", "")


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(workspace: Path, files: list[Path], name: str, **options: Any) -> dict[str, Any]:
    tokenize(
        tuple(map(str, files)),
        output=workspace / name,
        tokenizer=workspace / "tokenizer",
        **options,
    )
    return read_manifest(workspace / name)


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
    assert length["dropped"] == {"too few characters": sums}
    assert length["documents"] == len(rows)
    assert regex["documents"] == len(rows) - len(short)
    assert url["dropped"].keys() == {"meta.url matches"}
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


def test_merged_counts_are_sums_and_describe_shows_them(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write(workspace / "raw.jsonl", documents(600))
    whole = run(workspace, [raw], "whole", filters=FILTERS)
    for number, part in enumerate(("0:9000", "9000:30123", "30123:")):
        run(workspace, [raw], f"part{number}", filters=FILTERS, byte_range=part)
    merge([workspace / f"part{number}" for number in range(3)], output=workspace / "merged")
    merged = read_manifest(workspace / "merged")
    assert merged["filters"] == whole["filters"]
    assert merged["filtered_documents"] == whole["filtered_documents"]
    capsys.readouterr()
    describe([workspace / "merged"])
    dropped = whole["filters"][0]["dropped"]["too few characters"]
    line = f"length (min_characters: 50): too few characters: {dropped['documents']} documents, "
    assert line in capsys.readouterr().out
    describe([workspace / "merged"], output=workspace / "metadata.json")
    (metadata,) = json.loads((workspace / "metadata.json").read_text())
    assert metadata["filters"] == whole["filters"]
    run(workspace, [raw], "unfiltered")
    merge([workspace / "whole", workspace / "unfiltered"], output=workspace / "mixed")
    mixed = read_manifest(workspace / "mixed")
    assert mixed["documents_in"] == 1200
    assert mixed["documents"] == 1200 - mixed["filtered_documents"] - mixed["empty_documents"]


def test_samples_show_what_each_filter_did(workspace: Path) -> None:
    rows = list(documents(600))
    raw = write(workspace / "raw.jsonl", rows)
    filters = run(workspace, [raw], "out", filters=FILTERS)["filters"]
    for entry in filters:
        numbers = {"kept": 0, "changed": 0, "dropped": 0}
        for sample in entry["samples"]:
            path, line = sample["place"].rsplit(":", 1)
            assert path == str(raw)
            text = rows[int(line) - 1]["text"]
            numbers[sample["verdict"]] += 1
            if sample["verdict"] == "changed":
                assert sample["after"].strip("…") in text.replace("é", "")
                assert "é" in sample["text"]
                assert "é" not in sample["after"]
            if sample["verdict"] == "kept" and entry["filter"] == "length":
                assert len(text) >= 50
            if sample.get("reason") == "too few characters":
                assert sample["value"] == len(text) < 50
            assert sample["text"].rstrip("…") in text.replace("é", "") or "é" in text
        dropped = sum(min(3, sums["documents"]) for sums in entry["dropped"].values())
        changed = entry["changed"].get("documents", 0)
        kept = entry["documents"] - changed - sum(s["documents"] for s in entry["dropped"].values())
        expected = {"kept": min(3, kept), "changed": min(3, changed), "dropped": dropped}
        assert numbers == expected


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"documents_in": 599}, "documents_in is 599, but documents and empty, quarantined, dup"),
        ({"filtered_documents": 3}, "filters dropped 490 documents, but filtered_documents is 3"),
        ({"empty_documents": 5}, "documents_in is 600, but documents and empty"),
    ],
)
def test_counts_that_do_not_add_up_are_a_fault(
    workspace: Path, change: dict[str, int], fault: str
) -> None:
    raw = write(workspace / "raw.jsonl", documents(600))
    manifest = run(workspace, [raw], "out", filters=FILTERS)
    assert [*count_faults(manifest)] == []
    write_manifest(workspace / "out.json", manifest | change)
    with pytest.raises(UserError, match=rf"out\.json: counts do not add up: {fault}"):
        describe([workspace / "out"])
    manifest["filters"][1]["documents"] += 1
    assert len([*count_faults(manifest)]) == 2


def test_samples_of_parts_are_those_of_the_whole() -> None:
    numbers = random.Random(1)
    samples = [
        {
            **{"hash": f"{numbers.getrandbits(64):016x}", "place": str(number), "text": "a"},
            **numbers.choice([{"verdict": "kept"}, {"verdict": "dropped", "reason": "x"}]),
        }
        for number in range(300)
    ]
    whole = smallest(samples)
    assert len(whole) == 6
    cuts = (0, 1, 100, 101, 300)
    parts = [smallest(samples[slice(*cut)]) for cut in pairwise(cuts)]
    assert smallest(sample for part in reversed(parts) for sample in part) == whole
    reasons = [sample | {"verdict": "dropped", "reason": sample["place"]} for sample in samples]
    assert len(smallest(reasons)) == 18


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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"failed \(ZeroDivisionError: division by zero\); fix the filter"),
        ("return 3", r"failed \(AttributeError: .*\); fix the filter"),
        ("document.text = None", r"failed \(AttributeError: .*\); fix the filter"),
        ("document.text = '\\ud800'", r"failed \(UnicodeEncodeError: .*\); fix the filter"),
        ("document.metrics['x'] = 'y'", r"failed \(TypeError: .*\); fix the filter"),
        ("document.metrics['x'] = float('nan')", r"failed \(ValueError: nan .*\); fix the filter"),
        ("return Drop('a', float('inf'))", r"failed \(ValueError: inf .*\); fix the filter"),
        ("raise KeyError('a', 'b\\nc')", r"failed \(KeyError: \('a', 'b.*c'\)\); fix the filter"),
    ],
)
def test_a_filter_that_fails_is_one_line(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.chdir(workspace)
    name = f"failing{abs(hash(body))}.py"
    head = "from tokamake.data.filters import *\nfrom tokamake.data.filters import DocumentFilter\n"
    Path(name).write_text(
        f"{head}class Filter(DocumentFilter):\n    def apply(self, document):\n        {body}\n"
    )
    with pytest.raises(UserError, match=rf"raw\.jsonl:1: filter {name} {message}"):
        run(workspace, [write(workspace / "raw.jsonl", [{"text": "a"}])], "out", filters=name)
    assert not list(workspace.glob("out*"))


FAILING = """
import time
from tokamake.data.filters import DocumentFilter

class Filter(DocumentFilter):
    def apply(self, document):
        if "broken" in document.text:
            raise ValueError("no such word")
        if "slow" in document.text:
            try:
                while True:
                    time.sleep(0.01)
            except Exception:
                pass
"""
ENDLESS = "regex: {drop: '^(a+)+$'}"


def test_documents_on_which_a_filter_fails_are_quarantined(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    Path("failing.py").write_text(FAILING)
    endless = "a" * 60 + "!"
    texts = ["good", "broken", endless, "slow", "short", "good again", "broken again", "lorem"]
    raw = write(workspace / "raw.jsonl", [{"text": text} for text in texts])
    filters = f"regex: {{drop: lorem}}, failing.py, {ENDLESS}, length: {{min_words: 2}}"
    options = {"on_bad_document": "quarantine", "max_bad_fraction": 1, "filter_seconds": 0.2}
    manifest = run(workspace, [raw], "out", filters=filters, **options)
    lines = Path("out.quarantine.jsonl").read_text().splitlines()
    failed = {(entry["line"], entry["reason"]) for entry in map(json.loads, lines)}
    error = "filter failing.py failed (ValueError: no such word); fix the filter"
    limit = "ran longer than filter_seconds 0.2; fix the filter or raise filter_seconds"
    assert failed == {
        *((line, error) for line in (2, 7)),
        (3, f"filter regex {limit}"),
        (4, f"filter failing.py {limit}"),
    }
    assert manifest["filter_seconds"] == 0.2
    counts = manifest["filters"]
    assert [each["documents"] for each in counts] == [8, 7, 4, 3]
    assert counts[1]["quarantined"] == {
        "ValueError": {"documents": 2, "characters": 18},
        "time limit": {"documents": 1, "characters": 4},
    }
    (first, *_) = [row for row in verdicts(counts) if row.filter == "failing.py"]
    assert (first.reason, first.documents) == ("quarantined: ValueError", 2)
    assert counts[2]["quarantined"] == {"time limit": {"documents": 1, "characters": 61}}
    assert (manifest["documents"], manifest["quarantined_documents"]) == (1, 4)
    assert (manifest["documents_in"], manifest["filtered_documents"]) == (8, 3)


def test_an_endless_filter_stops_with_its_document(workspace: Path) -> None:
    raw = write(workspace / "raw.jsonl", [{"text": "good"}, {"text": "a" * 60 + "!"}])
    message = (
        r"raw\.jsonl:2: filter regex ran longer than filter_seconds 0\.1; fix the filter or raise "
        "filter_seconds, or set on_bad_document to quarantine"
    )
    with pytest.raises(UserError, match=message):
        run(workspace, [raw], "out", filters=ENDLESS, filter_seconds=0.1)
    assert not list(workspace.glob("out*"))


def test_a_file_on_which_a_filter_always_fails_is_an_error(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    Path("failing.py").write_text(FAILING)
    raw = write(workspace / "raw.jsonl", [{"text": "broken"}] * 3)
    options = {"on_bad_document": "quarantine", "max_bad_fraction": 1}
    with pytest.raises(UserError, match=r"no such word.*or a filter fails on each; fetch it"):
        run(workspace, [raw], "out", filters="failing.py", **options)


def test_an_unknown_column_of_a_table_is_one_line(workspace: Path) -> None:
    table = workspace / "table.parquet"
    parquet.write_table(arrow.table({"text": ["a"]}), table)
    with pytest.raises(UserError, match='no column "url" among text; fix the filters'):
        run(workspace, [table], "out", filters="regex: {field: url, drop: a}")


def test_tables_list_the_most_frequent_verdict_first() -> None:
    dropped = {"few": {"documents": 1, "value": 4}, "many": {"documents": 3, "characters": 9}}
    entry = {"filter": "f", "options": {"a": 1}, "documents": 10, "changed": {}, "metrics": {}}
    listed = verdicts(merge_counts([[entry | {"dropped": dropped}]]))
    assert [(row.reason, row.share, row.mean) for row in listed] == [
        ("many", 0.3, None),
        ("few", 0.1, 4.0),
    ]
    assert [row.reason for row in verdicts([entry | {"dropped": {}}])] == ["none dropped"]
    assert list(islice(verdicts([]), 1)) == []
    metrics = {f"score of {code}": {"documents": 9, "value": 4.5} for code in "abcdefghij"}
    rare = {"score of x": {"documents": 1, "value": 1}, "score of y": {"documents": 3, "value": 1}}
    rows = verdicts([entry | {"dropped": {}, "metrics": rare | metrics}])
    assert [row.reason for row in rows[:10]] == [*metrics]
    assert [(row.reason, row.documents, row.mean) for row in rows[10:]] == [
        ("2 rarer metrics, see the manifest", 4, None)
    ]
