"""The arrays of a dataset, compared with megatron-core's GPTDataset of the same dataset."""

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

from tests.support.megatron_datasets import assert_identical, config, random_lengths, write_dataset
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples import sample_index


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
@pytest.mark.parametrize("num_epochs", [0.3, 1.0, 1.5, 1.79, 1.81, 2.95, 7.2])
def test_arrays_equal_megatron(
    tmp_path: Path, seed: int, sequence_length: int, num_epochs: float
) -> None:
    prefix = write_dataset(tmp_path / "pair", random_lengths(seed, 40))
    lengths, documents = IndexedDataset(prefix).lengths, range(3, 37)
    tokens = int(lengths[documents.start : documents.stop].sum())
    settings = {
        "num_samples": round(num_epochs * (tokens // sequence_length)),
        "sequence_length": sequence_length,
        "seed": seed,
    }
    index = sample_index.build(lengths, documents, **settings)
    reference = megatron_dataset(prefix, documents, **settings)
    assert_identical(index.document, reference.document_index)
    assert_identical(index.sample, reference.sample_index)
    assert_identical(index.shuffle, reference.shuffle_index)


def test_a_document_shorter_than_a_sample_equals_megatron(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "pair", [5])
    settings = {"num_samples": 9, "sequence_length": 64, "seed": 1}
    index = sample_index.build(IndexedDataset(prefix).lengths, range(1), **settings)
    reference = megatron_dataset(prefix, range(1), **settings)
    assert_identical(index.sample, reference.sample_index)
    assert_identical(index.shuffle, reference.shuffle_index)


@pytest.mark.parametrize("num_documents", [1, 2, 7, 40])
@pytest.mark.parametrize("num_samples", [1, 30, 100])
def test_a_last_partial_sample_equals_megatron(
    tmp_path: Path, num_documents: int, num_samples: int
) -> None:
    lengths = np.random.default_rng(num_documents).integers(1, 30, num_documents)
    lengths[-1] += -(lengths.sum() - 1) % 16 + 3  # an epoch leaves three tokens
    prefix = write_dataset(tmp_path / "pair", lengths.tolist())
    settings = {"num_samples": num_samples, "sequence_length": 16, "seed": 3}
    documents = range(num_documents)
    index = sample_index.build(
        IndexedDataset(prefix).lengths, documents, drop_last_partial_sequence=False, **settings
    )
    reference = megatron_dataset(prefix, documents, split=Split.valid, **settings)
    assert_identical(index.document, reference.document_index)
    assert_identical(index.sample, reference.sample_index)
    assert_identical(index.shuffle, reference.shuffle_index)
    whole = sample_index.build(IndexedDataset(prefix).lengths, documents, **settings)
    assert len(index.shuffle) == len(whole.shuffle) + 1


def test_separate_last_epoch_overrides_the_threshold() -> None:
    lengths = np.full(50, 10, np.int32)
    settings = {"sequence_length": 10, "seed": 5}
    for num_samples in (60, 95):
        separate, joint = (
            sample_index.build(
                lengths,
                range(50),
                num_samples=num_samples,
                separate_last_epoch=separate_last,
                **settings,
            )
            for separate_last in (True, False)
        )
        assert sorted(separate.document[50:]) == list(range(50))
        assert sorted(separate.shuffle[:49]) == list(range(49))
        assert sorted(joint.document[50:]) != list(range(50))
        assert sorted(joint.document) == sorted(separate.document)
        assert sorted(joint.shuffle) == sorted(separate.shuffle) == list(range(99))
