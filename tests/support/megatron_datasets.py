"""Small indexed datasets for tests, and megatron-core as the reference to compare with."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.indexed.paths import bin_path, idx_path

if TYPE_CHECKING:  # importing megatron.core takes seconds, of every start of pytest
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig


def write_dataset(prefix: Path, lengths: list[int], *, first_token: int = 0) -> Path:
    """Write documents with ascending tokens from `first_token`: a token tells its position."""
    tokens = np.arange(first_token, first_token + sum(lengths))
    paths = (prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("bin", "idx"))
    with DatasetWriter(*paths, dtype=np.int32) as writer:
        writer.add(tokens, np.array(lengths, np.int32))
    return prefix


MERGE_INPUTS = [[[1, 2, 3], [], [4]], [], [[5, 6, 7, 8, 9]], [[], [10]]]
"""Documents of four datasets to merge: some are empty, one dataset has none."""


def write_megatron_dataset(
    prefix: Path, documents: list[list[int]], dtype: type = np.uint16, *, longest: int = 1 << 30
) -> Path:
    """Write a dataset with megatron-core; sequences have at most `longest` tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from torch import tensor

    prefix.parent.mkdir(exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens in documents:
        starts = range(0, len(tokens), longest)
        builder.add_document(tensor(tokens), [len(tokens[start:][:longest]) for start in starts])
    builder.finalize(f"{prefix}.idx")
    return prefix


def overwrite(path: Path, offset: int, value: int, kind: str) -> None:
    """Overwrite a number in a file; `kind` is a format of `struct`."""
    content = bytearray(path.read_bytes())
    struct.pack_into(kind, content, offset, value)
    path.write_bytes(content)


def random_lengths(seed: int, num_documents: int) -> list[int]:
    """Draw document lengths from 0 to 30 tokens; the first and the last document are empty."""
    lengths = np.random.default_rng(seed).integers(0, 31, num_documents)
    lengths[[0, -1]] = 0
    return lengths.tolist()


def config(
    *, sequence_length: int, seed: int, split: str, blend: tuple[list[str], list[float] | None]
) -> "GPTDatasetConfig":
    """Configure megatron-core like tokamake; it caches its indexes beside the data."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend=blend,
        split=split,
        tokenizer=SimpleNamespace(vocab_size=70_000, eod=-2, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def assert_same_dataset(prefix: Path, expected: Path) -> None:
    """Compare the .bin and .idx files of two datasets byte by byte."""
    assert bin_path(prefix).read_bytes() == bin_path(expected).read_bytes()
    assert idx_path(prefix).read_bytes() == idx_path(expected).read_bytes()


def assert_identical(array: np.ndarray, expected: np.ndarray) -> None:
    """Compare shape, dtype and every value."""
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected, strict=True)


def megatron_merge(prefixes: list[Path], output: Path, dtype: type) -> Path:
    """Merge datasets as Megatron's merge_datasets.py does."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=dtype)
    for prefix in prefixes:
        builder.add_index(str(prefix))
    builder.finalize(f"{output}.idx")
    return output
