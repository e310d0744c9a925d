"""Document, sample and shuffle index against megatron-core's GPTDataset over the same file."""

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

from tests.support.megatron_datasets import assert_identical, config, random_lengths, write_dataset
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples import dataset_index


def megatron_dataset(
    prefix: Path,
    documents: range,
    *,
    num_samples: int,
    sequence_length: int,
    seed: int,
    split: Split = Split.train,
) -> GPTDataset:
    settings = config(
        sequence_length=sequence_length, seed=seed, split="1,0,0", blend=([str(prefix)], None)
    )
    settings.drop_last_partial_validation_sequence = split is not Split.valid
    return GPTDataset(
        GPTDataset.build_low_level_dataset(str(prefix), settings),
        str(prefix),
        np.arange(documents.start, documents.stop, dtype=np.int32),
        num_samples,
        split,
        settings,
    )


@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1])
@pytest.mark.parametrize("sequence_length", [2, 16, 100])
@pytest.mark.parametrize("epochs_wanted", [0.3, 1.0, 1.5, 1.79, 1.81, 2.95, 7.2])
def test_arrays_equal_megatron(
    tmp_path: Path, seed: int, sequence_length: int, epochs_wanted: float
) -> None:
    prefix = write_dataset(tmp_path / "pair", random_lengths(seed, 40))
    lengths, documents = IndexedDataset(prefix).lengths, range(3, 37)
    tokens = int(lengths[documents.start : documents.stop].sum())
    settings = {
        "num_samples": round(epochs_wanted * (tokens // sequence_length)),
        "sequence_length": sequence_length,
        "seed": seed,
    }
    ours = dataset_index.build(lengths, documents, **settings)
    theirs = megatron_dataset(prefix, documents, **settings)
    assert_identical(ours.document, theirs.document_index)
    assert_identical(ours.sample, theirs.sample_index)
    assert_identical(ours.shuffle, theirs.shuffle_index)


def test_one_document_shorter_than_a_sample(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "pair", [5])
    settings = {"num_samples": 9, "sequence_length": 64, "seed": 1}
    ours = dataset_index.build(IndexedDataset(prefix).lengths, range(1), **settings)
    theirs = megatron_dataset(prefix, range(1), **settings)
    assert_identical(ours.sample, theirs.sample_index)
    assert_identical(ours.shuffle, theirs.shuffle_index)


def test_a_scarcely_used_last_epoch_is_shuffled_by_itself() -> None:
    lengths = np.full(50, 10, np.int32)
    settings = {"sequence_length": 10, "seed": 5}
    separate = dataset_index.build(lengths, range(50), num_samples=60, **settings)
    assert sorted(separate.document[50:]) == list(range(50))
    assert sorted(separate.shuffle[:49]) == list(range(49))
    mixed = dataset_index.build(lengths, range(50), num_samples=95, **settings)
    assert sorted(mixed.document[50:]) != list(range(50))


@pytest.mark.parametrize("num_documents", [1, 2, 7, 40])
@pytest.mark.parametrize("num_samples", [1, 30, 100])
def test_a_last_partial_sample_equals_megatron(
    tmp_path: Path, num_documents: int, num_samples: int
) -> None:
    lengths = np.random.default_rng(num_documents).integers(1, 30, num_documents)
    lengths[-1] += -(lengths.sum() - 1) % 16 + 3  # three tokens are left of an epoch
    prefix = write_dataset(tmp_path / "pair", lengths.tolist())
    settings = {"num_samples": num_samples, "sequence_length": 16, "seed": 3}
    documents = range(num_documents)
    ours = dataset_index.build(
        IndexedDataset(prefix).lengths, documents, drop_last_partial_sequence=False, **settings
    )
    theirs = megatron_dataset(prefix, documents, split=Split.valid, **settings)
    assert_identical(ours.document, theirs.document_index)
    assert_identical(ours.sample, theirs.sample_index)
    assert_identical(ours.shuffle, theirs.shuffle_index)
    whole = dataset_index.build(IndexedDataset(prefix).lengths, documents, **settings)
    assert len(ours.shuffle) == len(whole.shuffle) + 1


def test_the_last_epoch_as_wanted() -> None:
    lengths = np.full(50, 10, np.int32)
    settings = {"sequence_length": 10, "seed": 5}
    for num_samples in (60, 95):
        separate, mixed = (
            dataset_index.build(
                lengths, range(50), num_samples=num_samples, separate_last_epoch=wanted, **settings
            )
            for wanted in (True, False)
        )
        assert sorted(separate.document[50:]) == list(range(50))
        assert sorted(separate.shuffle[:49]) == list(range(49))
        assert sorted(mixed.document[50:]) != list(range(50))
        assert sorted(mixed.document) == sorted(separate.document)
        assert sorted(mixed.shuffle) == sorted(separate.shuffle) == list(range(99))
