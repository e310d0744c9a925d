"""What several tests compare with: tiny token files, and megatron-core's datasets over them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from tokamake.data import pairs
from tokamake.data.pairs.indexed import Writer


def write_pair(prefix: Path, lengths: list[int], *, first_token: int = 0) -> Path:
    """Write documents whose tokens count upwards from `first_token`: each tells its place."""
    tokens = np.arange(first_token, first_token + sum(lengths))
    paths = (prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("bin", "idx"))
    with Writer(*paths, np.int32) as writer:
        writer.add(tokens, np.array(lengths, np.int32))
    return prefix


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
    assert pairs.bin_path(ours).read_bytes() == pairs.bin_path(theirs).read_bytes()
    assert pairs.idx_path(ours).read_bytes() == pairs.idx_path(theirs).read_bytes()


def assert_identical(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Compare shape, dtype and every value."""
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs, strict=True)
