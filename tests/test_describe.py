"""Metadata of pairs: counts from manifests, lengths from the index, pairs from a plan."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tokamake.data import pairs
from tokamake.data.pairs import statistics
from tokamake.data.pairs.describe import describe
from tokamake.data.pairs.indexed import IndexedDataset, Writer
from tokamake.errors import UserError


def write_pair(prefix: Path, counts: list[list[int]], **more: object) -> Path:
    """A pair of documents, each given by the lengths of its sequences."""
    lengths = np.array([length for document in counts for length in document], np.int32)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    bin_file, idx_file = pairs.bin_path(prefix), pairs.idx_path(prefix)
    with Writer(bin_file, idx_file, np.uint16) as writer:
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
        **more,
    }
    pairs.write_manifest(pairs.manifest_path(prefix), manifest)
    return prefix


def test_counts_lengths_and_places_are_told(tmp_path: Path) -> None:
    first = write_pair(tmp_path / "merged/code-0000", [[1], [2], [3], [4, 3], [], [1000]])
    second = write_pair(tmp_path / "merged/code-0001", [[5, 5, 6]])
    describe([second, first], output=tmp_path / "metadata.json")
    told = json.loads((tmp_path / "metadata.json").read_text())
    assert [pair["data_prefix"] for pair in told] == ["merged/code-0000", "merged/code-0001"]
    one = told[0]
    assert (one["total_num_docs"], one["total_num_sequences"], one["total_num_tokens"]) == (
        6,
        6,
        1013,
    )
    assert (one["documents_in"], one["quarantined_documents"]) == (9, 2)
    assert (one["empty_documents"], one["duplicate_documents"]) == (1, 1)
    assert one["tokens_per_byte"] == 0.25
    filled = {
        (bin["shortest"], bin["longest"]): (bin["documents"], bin["tokens"])
        for bin in one["lengths"]
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
    assert told[1]["lengths"] == [{"shortest": 16, "longest": 31, "documents": 1, "tokens": 16}]
    each = json.loads((tmp_path / "metadata/code-0001.json").read_text())
    assert each == told[1]


def test_histogram_counts_every_document_once_whatever_the_chunks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 400, rng.integers(0, 5)).tolist() for _ in range(2000)]
    pair = IndexedDataset(write_pair(tmp_path / "many", documents))
    expected: dict[int, list[int]] = {}
    for document in documents:
        counted = expected.setdefault(sum(document).bit_length(), [0, 0])
        counted[0] += 1
        counted[1] += sum(document)
    for chunk in (1, 7, 1999, 1 << 16):
        bins = statistics.histogram(statistics.document_lengths(pair, chunk))
        assert {
            bin["longest"].bit_length(): [bin["documents"], bin["tokens"]] for bin in bins
        } == expected
        for before, after in pairwise(bins):
            assert after["shortest"] == before["longest"] + 1


def test_bin_bounds_are_exact_where_lengths_are_large() -> None:
    for power in (1, 10, 31, 40, 52):
        lengths = np.array([2**power - 1, 2**power])
        below, above = statistics.histogram([lengths])
        assert (below["longest"], below["documents"]) == (2**power - 1, 1)
        assert (above["shortest"], above["documents"], above["tokens"]) == (2**power, 1, 2**power)


def test_histograms_add_up_and_have_a_median() -> None:
    parts = [np.array([1, 5, 5]), np.array([], int), np.array([0, 70, 9000])]
    added = statistics.add(statistics.histogram([part]) for part in parts)
    assert added == statistics.histogram([np.concatenate(parts)])
    median = statistics.median_bin(added)
    assert median is not None
    assert (median["shortest"], median["longest"]) == (4, 7)
    assert statistics.median_bin(statistics.histogram([])) is None


def test_pairs_can_be_named_by_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokamake.config import PlanSettings
    from tokamake.data.text.corpora import Corpus
    from tokamake.data.text.plan import make_plan
    from tokamake.data.text.planned import write_plan

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    corpus = Corpus(corpus="code", files=str(tmp_path / "a.jsonl"), text_key="text", weight=1)
    made = make_plan([corpus], PlanSettings(), {})
    write_plan(tmp_path / "plan.json", made)
    for group in made.merged:
        write_pair(tmp_path / "merged" / group.name, [[4]])
    given = {"plan": tmp_path / "plan.json", "input": tmp_path / "merged"}
    describe(**given, output=tmp_path / "metadata.json")
    told = json.loads((tmp_path / "metadata.json").read_text())
    assert [pair["data_prefix"] for pair in told] == [f"merged/{made.merged[0].name}"]
    with pytest.raises(UserError, match="give prefixes, or --plan with --input"):
        describe(plan=given["plan"], output=tmp_path / "other.json")
    with pytest.raises(UserError, match="give prefixes, or --plan with --input"):
        describe([tmp_path / "a"], **given, output=tmp_path / "other.json")


@pytest.mark.parametrize("changed", [{"tokens": 8}, {"sequences": 3}, {"documents": 1}])
def test_a_pair_that_differs_from_its_manifest_is_refused(
    tmp_path: Path, changed: dict[str, int]
) -> None:
    prefix = write_pair(tmp_path / "code-0000", [[4], [5]], **changed)
    with pytest.raises(UserError, match="code-0000: its index differs from its manifest"):
        describe([prefix], output=tmp_path / "metadata.json")
    assert not (tmp_path / "metadata.json").exists()


def test_nothing_to_describe_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no pair given"):
        describe([], output=tmp_path / "metadata.json")
    assert not list(tmp_path.iterdir())
