"""Existing datasets become merged datasets by links; what does not fit is refused."""

import struct
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch import tensor

from tokamake.config.data import PlanSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import write_plan
from tokamake.data.indexed.manifest import find_fault, read_manifest
from tokamake.data.indexed.merge_batch import merge_batch
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError

DOCUMENTS = [[5, 6, 0], [7, 0], [], [8, 9, 10, 0]]


@pytest.fixture
def home(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workspace)
    Path("pre").mkdir()
    assert open_tokenizer(Path("tokenizer")).eod == 0
    return workspace


def write(
    name: str, documents: list[list[int]] = DOCUMENTS, dtype: type[np.number] = np.uint16
) -> None:
    """A dataset as megatron-core writes it."""
    builder = IndexedDatasetBuilder(f"pre/{name}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(tensor(document, dtype=None), [len(document)])
    builder.finalize(f"pre/{name}.idx")


def link(
    files: str = "pre", *, corpus_format: str = "indexed", max_jobs: int = 512, **options: object
) -> None:
    """Plan the datasets, and run each job."""
    corpus = Corpus(corpus="web", files=files, format=corpus_format, weight=1)
    plan = make_plan([corpus], PlanSettings(max_jobs=max_jobs), declared={})
    write_plan(Path("plan.json"), plan)
    for batch in plan.merge_batches:
        merge_batch(
            plan=Path("plan.json"),
            batch=batch.name,
            input=Path("shards"),
            output=Path("merged"),
            summary=Path("batch.json"),
            **{"tokenizer": Path("tokenizer"), **options},  # type: ignore[arg-type]
        )


MERGED = Path("merged/web-0000_text_document")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_files_are_linked_with_a_manifest(home: Path, dtype: type[np.number]) -> None:
    write("a", dtype=dtype)
    content = [Path(f"pre/a.{suffix}").read_bytes() for suffix in ("bin", "idx")]
    link()
    assert Path(f"{MERGED}.bin").resolve() == Path("pre/a.bin").resolve()
    manifest = read_manifest(MERGED)
    tokenizer = open_tokenizer(Path("tokenizer"))
    assert manifest["tokenizer"] == tokenizer.fingerprint
    assert manifest["vocab_size"] == tokenizer.vocab_size
    assert (manifest["documents"], manifest["tokens"], manifest["eod"]) == (4, 9, 0)
    assert find_fault(MERGED) is None
    read = [list(map(int, document)) for document in MegatronDataset(str(MERGED))]
    assert read == DOCUMENTS
    assert content == [Path(f"pre/a.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def test_a_complete_link_is_kept_and_a_changed_dataset_is_checked_again(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("a")
    link()
    link()
    assert "is already complete" in capsys.readouterr().out
    write("a", [*DOCUMENTS, [3, 0]])
    link()
    assert read_manifest(MERGED)["documents"] == 5


def test_a_damaged_dataset_leaves_the_earlier_links(home: Path) -> None:
    write("a")
    link()
    content = Path(f"{MERGED}.json").read_bytes()
    write("a", [[5, 6]])
    with pytest.raises(UserError, match="do not end with 0"):
        link()
    assert Path(f"{MERGED}.bin").is_symlink()
    assert Path(f"{MERGED}.json").read_bytes() == content


def test_a_dataset_of_tokamake_keeps_its_counts_and_its_sources(home: Path) -> None:
    raw = sorted(Path("raw/code").iterdir())
    tokenize((str(raw[0]),), output=Path("pre/a"), tokenizer=Path("tokenizer"))
    link()
    expected, manifest = read_manifest(Path("pre/a")), read_manifest(MERGED)
    for key in ("documents", "documents_in", "text_bytes", "sha256", "text_key"):
        assert manifest[key] == expected[key]
    assert Path(f"{MERGED}.sources").is_symlink()
    assert manifest["sources"][0]["inputs"] == expected["inputs"]


def test_floating_point_tokens_and_tntidx_are_converted_to_new_files(home: Path) -> None:
    write("a")
    Path("pre/a.idx").write_bytes(
        b"TNTIDX\0\0"
        + struct.pack("<QQQQQQ", 1, 8, 2, 4, 4, 5)
        + np.array([*range(5), *np.cumsum([0, 3, 2, 0, 4]), 3, 2, 0, 4, *range(5)], "<i8").tobytes()
    )
    link()
    assert not Path(f"{MERGED}.bin").is_symlink()
    assert [list(map(int, document)) for document in MegatronDataset(str(MERGED))] == DOCUMENTS
    assert read_manifest(MERGED)["vocab_size"] == open_tokenizer(Path("tokenizer")).vocab_size
    write("a", dtype=np.float64)
    link()
    assert [list(map(int, document)) for document in MegatronDataset(str(MERGED))] == DOCUMENTS


def test_a_dataset_where_its_link_would_be_is_not_replaced(home: Path) -> None:
    write("a")
    Path("merged").mkdir()
    for suffix in ("bin", "idx"):
        Path(f"pre/a.{suffix}").rename(f"{MERGED}.{suffix}")
    content = Path(f"{MERGED}.bin").read_bytes()
    with pytest.raises(UserError, match="is both input and output"):
        link("merged")
    assert Path(f"{MERGED}.bin").read_bytes() == content


def test_several_faulty_datasets_are_a_line_each(home: Path) -> None:
    for name in "abc":
        write(name, [[5000, 0]] if name != "b" else DOCUMENTS)
    with pytest.raises(UserError) as caught:
        link(max_jobs=1)
    lines = str(caught.value).splitlines()
    assert ["pre/a.bin" in lines[0], "pre/c.bin" in lines[1]] == [True, True]
    assert len(lines) == 2
    assert Path("merged/web-0001_text_document.bin").is_symlink()


def test_the_vocabulary_bounds_all_tokens(home: Path) -> None:
    size = open_tokenizer(Path("tokenizer")).vocab_size
    for dtype in (np.uint16, np.int32):
        write("a", [[1, 2, 0], [3, size, 0]], dtype)
        with pytest.raises(UserError, match=rf"a\.bin: 1 token not in .* token 4: {size}"):
            link()
    write("a", [[-1, 0]], np.int32)
    with pytest.raises(UserError, match=r"a\.bin: 1 token not in .* token 0: -1"):
        link()
    write("a", [[size, 0]], np.float64)
    with pytest.raises(UserError, match=rf"a\.bin: has token {size}, the vocabulary "):
        link()
    assert not list(Path("merged").glob("*"))


def test_documents_must_end_with_the_end_of_document_token(home: Path) -> None:
    write("a", [[5, 0], [6, 7], [], [8]])
    with pytest.raises(UserError, match=r"a\.bin: 2 of 3 documents do not end with 0, the token"):
        link()
    link(append_eod=False)
    assert read_manifest(MERGED)["documents"] == 4


def test_damaged_files_and_other_tokenizers_are_refused(home: Path) -> None:
    raw = sorted(Path("raw/code").iterdir())
    tokenize((str(raw[0]),), output=Path("pre/a"), tokenizer=Path("tokenizer"))
    with Path("pre/a.bin").open("r+b") as stream:
        stream.write(b"\1\1")
    with pytest.raises(UserError, match=r"a\.bin: differs from the hash in its manifest"):
        link()
    tokenize((str(raw[0]),), output=Path("pre/a"), tokenizer=Path("tokenizer"))
    content = Path("pre/a.idx").read_bytes()
    Path("pre/a.idx").write_bytes(content[:-8])
    with pytest.raises(UserError, match=r"a\.idx: has \d+ bytes, its manifest says"):
        link()
    Path("pre/a.idx").write_bytes(content)
    config = Path("tokenizer/tokenizer_config.json")
    config.write_text(config.read_text().replace("{", '{"added": 1,', 1))
    with pytest.raises(UserError, match="pre/a: made with another tokenizer"):
        link()
    with pytest.raises(UserError, match="--tokenizer: missing; web has existing datasets"):
        link(tokenizer=None)


def test_shards_of_the_same_name_do_not_overwrite_the_linked_dataset(home: Path) -> None:
    write("a")
    content = Path("pre/a.bin").read_bytes()
    link()
    raw = sorted(Path("raw/code").iterdir())
    tokenize((str(raw[0]),), output=Path("shards/web/00000"), tokenizer=Path("tokenizer"))
    link(str(raw[0]), corpus_format="")
    assert not Path(f"{MERGED}.bin").is_symlink()
    assert read_manifest(MERGED)["sources"][0]["path"] == "shards/web/00000"
    assert Path("pre/a.bin").read_bytes() == content
