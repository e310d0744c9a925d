"""Index of a dataset of sentences: epochs, and documents that give no sample."""

import logging
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tokamake.data.indexed.dataset import DatasetWriter, IndexedDataset
from tokamake.data.mixture.weighting_file import WeightedPrefix
from tokamake.data.samples.dataset_indexers import (
    MaskingIndexer,
    SampleMapping,
    WeightedDataset,
)
from tokamake.data.samples.index_options import IndexSettings
from tokamake.data.samples.sentence_masking import SentenceMasking
from tokamake.errors import UserError

MASKING = SentenceMasking(
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


def indexer(*, seed: int = 5, epochs: Fraction | None = None) -> MaskingIndexer:
    settings = IndexSettings(
        20,
        seed,
        blend="weighted",
        within_corpus="concatenated",
        separate_last_epoch=None,
        drop_last_partial_sequence=True,
        objective=MASKING._asdict(),
    )
    kinds = np.zeros(0, np.uint8)
    return MaskingIndexer(settings, epochs_of={"a": epochs} if epochs else {}, pieces=kinds)


def rows_of(dataset: WeightedDataset, epochs: Fraction) -> SampleMapping:
    return indexer(epochs=epochs).build(dataset, 0).mapping


def test_whole_epochs_are_shuffled_together(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    sentences = indexer()
    epoch = sentences.build(dataset, 1)
    size = len(epoch.mapping)
    assert sentences.num_epochs(dataset, epoch) == 1
    assert {*epoch.mapping[:, 0].tolist()} & {*range(5)}
    three = sentences.build(dataset, 2 * size + 1)
    assert sentences.num_epochs(dataset, three) == 3
    # Sentences of the document with a long one, and of the short one, are in no sample.
    used = {s for first, end, _ in three.mapping.tolist() for s in range(first, end)}
    assert used == {*range(5), *range(9, 18), *range(18, 21)}


def test_epochs_are_exact(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    one = rows_of(dataset, Fraction(1))
    np.testing.assert_array_equal(one, indexer().build(dataset, 1).mapping)
    four = indexer(epochs=Fraction(4)).build(dataset, 0)
    assert indexer().num_epochs(dataset, four) == 4
    two, mixed = rows_of(dataset, Fraction(2)), rows_of(dataset, Fraction(5, 2))
    np.testing.assert_array_equal(mixed[: len(two)], two)
    assert len(two) < len(mixed) < len(two) + len(one)
    assert 0 < len(rows_of(dataset, Fraction(1, 2))) <= len(one)


def test_the_split_of_documents_is_that_of_the_mapping(tmp_path: Path) -> None:
    dataset = make(tmp_path)._replace(documents=range(3, 5))
    assert dataset.sequences == range(9, 21)
    assert dataset.tokens == 8 * 9 + 4 * 3
    rows = indexer().build(dataset, 1).mapping
    assert rows[:, 0].min() == 9


def test_documents_without_a_sample_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        index = indexer().build(dataset := make(tmp_path), 1)
        indexer().check(dataset, index, drawn=1, split="train")
    assert caplog.messages == [
        "a: 1 of 5 documents of the train split are left out: they have a sentence of more than "
        "512 tokens",
        "a: 1 of 5 documents of the train split are left out: they have fewer than 2 sentences",
    ]


def test_a_dataset_without_a_sample_is_refused(tmp_path: Path) -> None:
    dataset = make(tmp_path, [[9], [5]])
    with pytest.raises(UserError, match=r"^a: no document gives a sample: a sample has 2 or more"):
        indexer().build(dataset, 10**6)


@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_seeds_are_those_of_megatrons_mapping(seed: int) -> None:
    with pytest.raises(UserError, match=f"^seed: {seed}: out of range"):
        indexer(seed=seed)
