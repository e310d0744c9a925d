"""Index of a dataset of sentences: epochs, and documents that give no sample."""

import logging
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tokamake.data.indexed.dataset import DatasetWriter, IndexedDataset
from tokamake.data.mixture.weights import WeightedPrefix
from tokamake.data.samples.sentence_index import SentenceIndexer, count_epochs
from tokamake.data.samples.sentence_masking import SentenceMasking
from tokamake.data.samples.weighted_datasets import WeightedDataset
from tokamake.errors import UserError

OBJECTIVE = SentenceMasking(
    name="masked",
    target_tokens=20,
    min_sentences=2,
    probability=0.15,
    max_ngram=3,
    short_sequence_probability=0.1,
    tokenizer="",
    tokens={},
    sentinels=[],
    sentence_order=True,
)
DOCUMENTS = [[6] * 5, [9], [5, 600, 5], [8] * 9, [4] * 3]
"""Tokens of the sentences of each document: the second is too short, the third has a long one."""


def make(folder: Path, documents: list[list[int]] = DOCUMENTS) -> WeightedDataset:
    lengths = np.array([length for document in documents for length in document], np.int32)
    counts = np.array([len(document) for document in documents], np.int32)
    with DatasetWriter(folder / "a.bin", folder / "a.idx", dtype=np.int32) as writer:
        writer.add(np.arange(lengths.sum()), lengths, counts)
    dataset = IndexedDataset(folder / "a")
    line = WeightedPrefix(1.0, "a", "a", None)
    return WeightedDataset(line, dataset, range(len(documents)), has_sentences=True)


def test_whole_epochs_are_shuffled_together(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    indexer = SentenceIndexer(OBJECTIVE, seed=5)
    epoch = indexer.build(dataset, 1)
    size = len(epoch.mapping)
    assert count_epochs(epoch) == 1
    assert {*epoch.mapping[:, 0].tolist()} & {*range(5)}
    three = indexer.build(dataset, 2 * size + 1)
    assert count_epochs(three) == 3
    # Sentences of the document with a long one, and of the short one, are in no sample.
    used = {s for first, end, _ in three.mapping.tolist() for s in range(first, end)}
    assert used == {*range(5), *range(9, 18), *range(18, 21)}


def test_epochs_are_exact(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    indexer = SentenceIndexer(OBJECTIVE, seed=5)
    one = indexer.build_epochs(dataset, Fraction(1)).mapping
    np.testing.assert_array_equal(one, indexer.build(dataset, 1).mapping)
    assert count_epochs(indexer.build_epochs(dataset, Fraction(4))) == 4
    two = indexer.build_epochs(dataset, Fraction(2)).mapping
    mixed = indexer.build_epochs(dataset, Fraction(5, 2)).mapping
    np.testing.assert_array_equal(mixed[: len(two)], two)
    assert len(two) < len(mixed) < len(two) + len(one)
    half = indexer.build_epochs(dataset, Fraction(1, 2)).mapping
    assert 0 < len(half) <= len(one)


def test_the_split_of_documents_is_that_of_the_mapping(tmp_path: Path) -> None:
    dataset = make(tmp_path)._replace(documents=range(3, 5))
    assert dataset.sequences == range(9, 21)
    assert dataset.tokens == 8 * 9 + 4 * 3
    rows = SentenceIndexer(OBJECTIVE, seed=5).build(dataset, 1).mapping
    assert rows[:, 0].min() == 9


def test_documents_without_a_sample_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        SentenceIndexer(OBJECTIVE, seed=5).warn_of_left_out(make(tmp_path), split="train")
    assert caplog.messages == [
        "a: 1 of 5 documents of the train split are left out: they have a sentence of more than "
        "512 tokens",
        "a: 1 of 5 documents of the train split are left out: they have fewer than 2 sentences",
    ]


def test_a_dataset_without_a_sample_is_refused(tmp_path: Path) -> None:
    dataset = make(tmp_path, [[9], [5]])
    with pytest.raises(UserError, match=r"^a: no document gives a sample: a sample has 2 or more"):
        SentenceIndexer(OBJECTIVE, seed=5).build(dataset, 10**6)


@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_seeds_are_those_of_megatrons_mapping(seed: int) -> None:
    with pytest.raises(UserError, match=f"^seed: {seed}: out of range"):
        SentenceIndexer(OBJECTIVE, seed=seed)
