"""Activations that a layer saves for its backward pass; families state how much of each kind.

Korthikanti et al. 2022 (arXiv 2205.05198), section 4, as torch saves them: without dropout masks,
and without attention scores, because SDPA computes them again.
"""

from typing import NamedTuple

from tokamake.config.architecture import Architecture


class SavedActivations(NamedTuple):
    """Bytes per token that a layer saves, by the ranks that share them."""

    states: int
    """Inputs of norms: sequence parallelism shares them."""
    gathered: int
    """Inputs of column-parallel layers: no ranks share them."""
    split: int
    """Heads and the width of the MLP: tensor-parallel ranks share them."""
    products: int
    """The results of matrix products and attention in `split`: selective recomputation saves
    these alone."""


def attention_bytes(architecture: Architecture, size: int) -> int:
    """Queries, keys, values and result of attention, and its fp32 normalizers.

    Args:
        architecture: shape of the model.
        size: bytes per number.
    """
    num_values = 2 * (architecture.query_size + architecture.key_value_size)
    return num_values * size + 4 * architecture.num_attention_heads


def rms_norm_bytes(width: int, size: int, *, fused: bool) -> int:
    """What an RMSNorm saves: its input, and unfused, as on CPUs, two fp32 copies of it."""
    return width * size if fused else 2 * width * 4
