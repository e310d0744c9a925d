"""What several tests compare with: tiny token files, and megatron-core's datasets over them."""

import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch import tensor

from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.indexed.paths import bin_path, idx_path


def write_pair(prefix: Path, lengths: list[int], *, first_token: int = 0) -> Path:
    """Write documents whose tokens count upwards from `first_token`: each tells its place."""
    tokens = np.arange(first_token, first_token + sum(lengths))
    paths = (prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("bin", "idx"))
    with DatasetWriter(*paths, np.int32) as writer:
        writer.add(tokens, np.array(lengths, np.int32))
    return prefix


PARTS = [[[1, 2, 3], [], [4]], [], [[5, 6, 7, 8, 9]], [[], [10]]]
"""Documents of pairs to merge: some empty, one pair without any."""


def megatron_pair(
    prefix: Path, documents: list[list[int]], dtype: type = np.uint16, *, longest: int = 1 << 30
) -> Path:
    """Write a pair of another program: sequences of a document have `longest` tokens at most."""
    prefix.parent.mkdir(exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens in documents:
        starts = range(0, len(tokens), longest)
        builder.add_document(tensor(tokens), [len(tokens[at : at + longest]) for at in starts])
    builder.finalize(f"{prefix}.idx")
    return prefix


def overwrite(path: Path, at: int, value: int, kind: str) -> None:
    """Put a number of a `struct` kind at a place of a file."""
    content = bytearray(path.read_bytes())
    struct.pack_into(kind, content, at, value)
    path.write_bytes(content)


def random_lengths(seed: int, num_documents: int) -> list[int]:
    """Draw document lengths from 0 to 30 tokens, the first and the last documents empty."""
    lengths = np.random.default_rng(seed).integers(0, 31, num_documents)
    lengths[[0, -1]] = 0
    return lengths.tolist()


def config(
    *, sequence_length: int, seed: int, split: str, blend: tuple[list[str], list[float] | None]
) -> GPTDatasetConfig:
    """Configure megatron-core as tokamake works; it will cache its indexes beside the data."""
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


def assert_same_pair(ours: Path, theirs: Path) -> None:
    """Compare two pairs' token files and indexes, byte by byte."""
    assert bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()
    assert idx_path(ours).read_bytes() == idx_path(theirs).read_bytes()


def assert_identical(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Compare shape, dtype and every value."""
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs, strict=True)


def megatron_merge(prefixes: list[Path], output: Path, dtype: type) -> Path:
    """What Megatron's merge_datasets.py does."""
    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=dtype)
    for prefix in prefixes:
        builder.add_index(str(prefix))
    builder.finalize(f"{output}.idx")
    return output
