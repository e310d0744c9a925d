"""`describe`: metadata and faults of datasets, of tokamake and of other programs."""

import hashlib
import json
import os
import re
import struct
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.megatron_datasets import overwrite, write_megatron_dataset
from tests.support.paths import ROOT
from tests.support.runs import make_index
from tokamake.data.indexed import length_histogram
from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.indexed.describe import describe
from tokamake.data.indexed.index_reader import read_layout
from tokamake.data.indexed.manifest import read_manifest, write_manifest
from tokamake.data.indexed.merge import merge
from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path
from tokamake.data.mixture.weigh import weigh
from tokamake.data.mixture.weighting_file import read_weighting_file
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError


def write_dataset(prefix: Path, counts: list[list[int]], **manifest_keys: object) -> Path:
    """Write a dataset of documents, each given by the lengths of its sequences."""
    lengths = np.array([length for document in counts for length in document], np.int32)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    bin_file, idx_file = bin_path(prefix), idx_path(prefix)
    with DatasetWriter(bin_file, idx_file, dtype=np.uint16) as writer:
        per_document = np.array([len(document) for document in counts], np.int32)
        writer.add(np.zeros(lengths.sum(), np.uint16), lengths, per_document)
    empty = sum(not document for document in counts)
    manifest = {
        "corpus": "code",
        "documents": len(counts) - empty,
        "empty_documents": empty,
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "text_bytes": 4 * int(lengths.sum()),
        "documents_in": len(counts) + 3,
        "quarantined_documents": 2,
        "duplicate_documents": 1,
        **dict.fromkeys(("dtype", "vocab_size", "eod", "tokenizer", "sources")),
        "bytes": {"bin": bin_file.stat().st_size, "idx": idx_file.stat().st_size},
        "sha256": {"bin": "", "idx": ""},
        **manifest_keys,
    }
    write_manifest(manifest_path(prefix), manifest)
    return prefix


def test_metadata_has_counts_lengths_and_prefixes(tmp_path: Path) -> None:
    first = write_dataset(tmp_path / "merged/code-0000", [[1], [2], [3], [4, 3], [], [1000]])
    second = write_dataset(tmp_path / "merged/code-0001", [[5, 5, 6]])
    describe([second, first], output=tmp_path / "metadata.json")
    metadata = read(tmp_path / "metadata.json")
    prefixes = [described["data_prefix"] for described in metadata]
    assert prefixes == ["merged/code-0000", "merged/code-0001"]
    counts = [metadata[0][f"total_num_{unit}"] for unit in ("docs", "sequences", "tokens")]
    assert counts == [6, 6, 1013]
    assert (metadata[0]["documents_in"], metadata[0]["quarantined_documents"]) == (9, 2)
    assert (metadata[0]["empty_documents"], metadata[0]["duplicate_documents"]) == (1, 1)
    assert metadata[0]["tokens_per_byte"] == 0.25
    filled = {
        (bin["shortest"], bin["longest"]): (bin["documents"], bin["tokens"])
        for bin in metadata[0]["lengths"]
        if bin["documents"]
    }
    assert filled == {
        (0, 0): (1, 0),
        (1, 1): (1, 1),
        (2, 3): (2, 5),
        (4, 7): (1, 7),
        (512, 1023): (1, 1000),
    }
    # A document's length is the sum over its sequences.
    assert metadata[1]["lengths"] == [{"shortest": 16, "longest": 31, "documents": 1, "tokens": 16}]
    assert read(tmp_path / "metadata/code-0001.json") == metadata[1]


def test_the_histogram_does_not_depend_on_the_chunk_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 400, rng.integers(0, 5)).tolist() for _ in range(2000)]
    layout = read_layout(idx_path(write_dataset(tmp_path / "many", documents)))
    expected: dict[int, list[int]] = {}
    for document in documents:
        counts = expected.setdefault(sum(document).bit_length(), [0, 0])
        counts[0] += 1
        counts[1] += sum(document)
    for chunk in (1, 7, 1999, 1 << 16):
        bins = length_histogram.histogram(length_histogram.document_lengths(layout, chunk))
        assert {
            bin["longest"].bit_length(): [bin["documents"], bin["tokens"]] for bin in bins
        } == expected
        for before, after in pairwise(bins):
            assert after["shortest"] == before["longest"] + 1


def test_bin_bounds_are_exact_for_large_lengths() -> None:
    for power in (1, 10, 31, 40, 52):
        lengths = np.array([2**power - 1, 2**power])
        below, above = length_histogram.histogram([lengths])
        assert (below["longest"], below["documents"]) == (2**power - 1, 1)
        assert (above["shortest"], above["documents"], above["tokens"]) == (2**power, 1, 2**power)


def test_histograms_add_up_and_have_a_median() -> None:
    chunks = [np.array([1, 5, 5]), np.array([], int), np.array([0, 70, 9000])]
    added = length_histogram.add(length_histogram.histogram([chunk]) for chunk in chunks)
    assert added == length_histogram.histogram([np.concatenate(chunks)])
    median = length_histogram.median_bin(added)
    assert median is not None
    assert (median["shortest"], median["longest"]) == (4, 7)
    assert length_histogram.median_bin(length_histogram.histogram([])) is None


def test_a_plan_names_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokamake.config.data import PlanSettings
    from tokamake.data.corpus.corpora import Corpus
    from tokamake.data.corpus.plan import make_plan
    from tokamake.data.corpus.plan_file import write_plan

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    corpus = Corpus(corpus="code", files=str(tmp_path / "a.jsonl"), text_key="text", weight=1)
    plan = make_plan([corpus], PlanSettings(), declared={})
    write_plan(tmp_path / "plan.json", plan)
    for group in plan.merged:
        write_dataset(tmp_path / "merged" / group.name, [[4]])
    options = {"plan": tmp_path / "plan.json", "input": tmp_path / "merged"}
    describe(**options, output=tmp_path / "metadata.json")
    metadata = read(tmp_path / "metadata.json")
    assert [described["data_prefix"] for described in metadata] == [f"merged/{plan.merged[0].name}"]
    with pytest.raises(UserError, match="give prefixes, or --plan with --input"):
        describe(plan=options["plan"], output=tmp_path / "other.json")
    with pytest.raises(UserError, match="give prefixes, or --plan with --input"):
        describe([tmp_path / "a"], **options, output=tmp_path / "other.json")


@pytest.mark.parametrize("changed", [{"tokens": 8}, {"sequences": 3}, {"documents": 1}])
def test_a_dataset_that_differs_from_its_manifest_is_refused(
    tmp_path: Path, changed: dict[str, int]
) -> None:
    prefix = write_dataset(tmp_path / "code-0000", [[4], [5]], **changed)
    with pytest.raises(UserError, match="code-0000: its index differs from its manifest"):
        describe([prefix], output=tmp_path / "metadata.json")
    assert not (tmp_path / "metadata.json").exists()


def test_no_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no dataset given"):
        describe([], output=tmp_path / "metadata.json")
    assert not list(tmp_path.iterdir())


DOCUMENTS = [[11, 12, 13, 9], [14, 9], [], [15, 16, 17, 18, 19, 9]]


def fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text())


def test_datasets_of_other_programs_are_described(tmp_path: Path) -> None:
    prefix = write_megatron_dataset(tmp_path / "in/wiki-en_text_document", DOCUMENTS)
    describe([prefix], output=tmp_path / "metadata.json")
    (described,) = read(tmp_path / "metadata.json")
    hashes = {name: fingerprint(Path(f"{prefix}.{name}")) for name in ("bin", "idx")}
    sizes = {name: Path(f"{prefix}.{name}").stat().st_size for name in ("bin", "idx")}
    lengths = [
        (bin["shortest"], bin["documents"], bin["tokens"]) for bin in described.pop("lengths")
    ]
    assert lengths == [(0, 1, 0), (1, 0, 0), (2, 1, 2), (4, 2, 10)]
    unknown = ("text_bytes", "empty_documents", "tokens_per_byte", "vocab_size", "eod", "tokenizer")
    assert described == {
        "data_prefix": "in/wiki-en_text_document",
        "total_num_docs": 4,
        "total_num_sequences": 3,
        "total_num_tokens": 12,
        "corpus": "wiki",
        **dict.fromkeys(unknown),
        "dtype": "uint16",
        "bytes": sizes,
        "sha256": hashes,
        "sources": [{"path": str(prefix), "inputs": [], "sha256": hashes}],
    }


def test_datasets_of_other_programs_are_weighted_and_indexed(tmp_path: Path) -> None:
    big = write_megatron_dataset(tmp_path / "in/wiki-0_text_document", [[*range(40), 9]] * 60)
    small = write_megatron_dataset(tmp_path / "in/wiki-1_text_document", [[5, 9]] * 60)
    code = write_megatron_dataset(tmp_path / "in/code-0_text_document", [[7, 8, 9]] * 60)
    describe([tmp_path / "in"], output=tmp_path / "metadata.json")
    table = tmp_path / "corpora.tsv"
    table.write_text("corpus\tfiles\ttext_key\tweight\nwiki\tx\ttext\t3\ncode\ty\ttext\t1\n")
    weights = tmp_path / "weights.txt"
    weigh(corpora=table, metadata=tmp_path / "metadata.json", output=weights)
    weighted = {line.prefix: (line.weight, line.corpus) for line in read_weighting_file(weights)}
    assert weighted == {
        "in/code-0_text_document": (0.25, "code"),
        "in/wiki-0_text_document": (pytest.approx(0.75 * 41 / 43), "wiki"),
        "in/wiki-1_text_document": (pytest.approx(0.75 * 2 / 43), "wiki"),
    }
    samples = {"train_samples": 20, "valid_samples": 0}
    make_index(tmp_path, sequence_length=8, split="1,0,0", seed=1, **samples)
    index = json.loads((tmp_path / "index/index.json").read_text())
    metadata = read(tmp_path / "metadata.json")
    hashes = {described["data_prefix"]: described["sha256"]["idx"] for described in metadata}
    assert hashes == {
        str(prefix.relative_to(tmp_path)): fingerprint(Path(f"{prefix}.idx"))
        for prefix in (big, small, code)
    }
    assert set(hashes) == set(index["pairs"])
    assert index["splits"]["train"]["samples"] >= 20


def number(offset: int, value: int, kind: str, file: str = "idx") -> Callable[[Path], None]:
    """Damage: another number in a file of a dataset."""
    return lambda prefix: overwrite(Path(f"{prefix}.{file}"), offset, value, kind)


def cut(file: str, size: int) -> Callable[[Path], None]:
    """Damage: a file is truncated."""
    return lambda prefix: os.truncate(f"{prefix}.{file}", size)


def lost(file: str) -> Callable[[Path], None]:
    """Damage: a file is missing."""
    return lambda prefix: Path(f"{prefix}.{file}").unlink()


@pytest.mark.parametrize(
    ("damages", "messages"),
    [
        # Lengths 4, 2, 6 stand from byte 34, pointers from 46, bounds 0, 1, 2, 2, 3 from 70.
        ([cut("bin", 22)], [r"a-0\.bin: 22 bytes, but its index counts 24; try `tokamake repair"]),
        (
            [number(54, 8 - 2**32, "<q")],
            [r"a-0\.idx: sequence 1 begins at -4294967288, but 8 .* `tokamake repair"],
        ),
        (
            [number(70, 1, "<q")],
            [r"a-0\.idx: document bounds do not ascend .* `tokamake repair"],
        ),
        ([cut("idx", 60)], [r"a-0\.idx: 60 bytes, its header says 110; .* `tokamake repair"]),
        (
            [lambda prefix: Path(f"{prefix}.idx").write_bytes(b"TNTIDX\0\0" + bytes(100))],
            [r"a-0\.idx: version 0"],
        ),
        (
            [number(17, 6, "<B")],
            [r"a-0\.idx: floating-point tokens; `tokamake merge` converts them"],
        ),
        (
            [number(17, 3, "<B"), number(4, -5, "<h", "bin")],
            [r"a-0\.bin: 1 token not in the vocabulary, the first is token 2: -5"],
        ),
        ([lost("bin")], [r"a-0\.bin: no such file"]),
        (
            [lost("bin"), lost("idx")],
            [r"a-0: no dataset: there is neither .*a-0\.bin nor .*a-0\.idx; fix the prefix"],
        ),
        (
            [number(54, 2, "<q"), number(70, 1, "<q"), cut("bin", 20)],
            ["sequence 1 begins at 2", "document bounds", "20 bytes, but its index counts 24"],
        ),
    ],
)
def test_faults_of_datasets_of_other_programs_are_reported(
    tmp_path: Path,
    damages: list[Callable[[Path], object]],
    messages: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    prefix = write_megatron_dataset(tmp_path / "a-0", DOCUMENTS)
    whole = write_megatron_dataset(tmp_path / "b-0", DOCUMENTS)
    for damage in damages:
        damage(prefix)
    for options in ({}, {"output": tmp_path / "metadata.json"}):
        with pytest.raises(UserError) as raised:
            describe([whole, prefix], **options)
        lines = str(raised.value).splitlines()
        assert len(lines) == len(messages)
        for line, message in zip(lines, messages, strict=True):
            assert re.search(message, line)
    assert not list(tmp_path.glob("metadata*"))
    table = capsys.readouterr().out
    assert re.search(rf"a-0 .* {len(messages)} faults?\n", table)
    assert re.search(r"b-0 +4 +3 +12 +24 +uint16 +- +whole\n", table)


def test_cached_indexes_are_refused_with_a_remedy(tmp_path: Path) -> None:
    np.array([1, 2, 3], np.int32).tofile(tmp_path / "lazy.bin")
    columns = [[0, 1, 2], [0, 2, 3], [2, 1], [0, 1, 2]]
    (tmp_path / "lazy.idx").write_bytes(
        b"TNTIDX\0\0"
        + struct.pack("<QQQQQQ", 1, 4, 4, 2, 2, 3)
        + b"".join(np.array(column, "<i8").tobytes() for column in columns)
    )
    with pytest.raises(UserError, match=r"lazy\.idx: .*TNTIDX\); `tokamake merge` converts it"):
        describe([tmp_path / "lazy"], output=tmp_path / "metadata.json")
    merge([tmp_path / "lazy"], output=tmp_path / "merged")
    describe([tmp_path / "merged"], output=tmp_path / "metadata.json")
    assert read(tmp_path / "metadata.json")[0]["total_num_tokens"] == 3


def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    peaks = []
    for size in (2_200_000, 4_400_000):
        prefix = tmp_path / f"data-{size}"
        with DatasetWriter(bin_path(prefix), idx_path(prefix), dtype=np.int32) as writer:
            writer.add(np.ones(size, np.int32), np.ones(size, np.int32))
        tracemalloc.start()
        describe([prefix], output=tmp_path / "metadata.json")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 5_000_000  # the larger dataset has 53 MB more


def test_manifests_are_not_overwritten(tmp_path: Path, ours: list[Path]) -> None:
    before = manifest_path(ours[2]).read_bytes()
    with pytest.raises(UserError, match=r"merged\.json: .* name another --output"):
        describe([ours[2]], output=ours[2].parent.parent / "merged.json")
    with pytest.raises(UserError, match=r"metadata: .* name ends with \.json"):
        describe([ours[2]], output=tmp_path / "metadata")
    assert manifest_path(ours[2]).read_bytes() == before
    assert not list(tmp_path.glob("metadata*"))


def test_duplicate_datasets_and_names_are_refused(tmp_path: Path) -> None:
    first = write_megatron_dataset(tmp_path / "a/x-0", DOCUMENTS)
    same_name = write_megatron_dataset(tmp_path / "b/x-0", DOCUMENTS)
    with pytest.raises(UserError, match="named twice"):
        describe([first, tmp_path / "a/../a/x-0"])
    describe([first, same_name])
    with pytest.raises(UserError, match="has the same name, and both would be"):
        describe([first, same_name], output=tmp_path / "metadata.json")
    assert not list(tmp_path.glob("metadata*"))


SCHEMA = json.loads((ROOT / "docs/reference/metadata.schema.json").read_text())
PAGE = (ROOT / "docs/reference/metadata.md").read_text()


def test_the_metadata_matches_the_docs_and_the_schema(workspace: Path, ours: list[Path]) -> None:
    import jsonschema

    foreign = write_megatron_dataset(workspace / "wiki-0", DOCUMENTS)
    merge([*ours[:2], foreign], output=workspace / "mixed")
    tokenize(
        (str(workspace / "raw/docs"),),
        output=workspace / "filtered",
        tokenizer=workspace / "tokenizer",
        filters="length: {min_words: 50}, regex: {replace: a}",
    )
    # As of `tokenize-batch` with a file of near-duplicates.
    counts = {**read_manifest(workspace / "filtered"), "near_duplicate_documents": 0}
    write_manifest(manifest_path(workspace / "filtered"), counts)
    datasets = [*ours, foreign, workspace / "mixed", workspace / "filtered"]
    describe(datasets, output=workspace / "metadata.json")
    metadata = read(workspace / "metadata.json")
    jsonschema.validate(metadata, SCHEMA)
    documented = SCHEMA["$defs"]["indexed_dataset"]
    assert set().union(*metadata) == set(documented["properties"])
    assert set.intersection(*map(set, metadata)) == set(documented["required"])
    assert set(documented["properties"]) == set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE))
    assert SCHEMA["$defs"]["indexed_dataset"]["required"] == [
        key
        for key in documented["properties"]
        if re.search(rf"^\| `{key}`.*(?<!absent) \|$", PAGE, re.MULTILINE)
    ]
    for described in metadata:
        nullable = {key for key, value in described.items() if value is None}
        for key in nullable:
            assert re.search(rf"^\| `{key}`.*\| null[^|]*\|$", PAGE, re.MULTILINE)
    assert read(workspace / "metadata/wiki-0.json") in metadata
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{**metadata[0], "total_num_docs": "4"}], SCHEMA)
