"""Activations that a layer saves for its backward pass; families state how much of each kind.

Korthikanti et al. 2022 (arXiv 2205.05198), section 4, as torch saves them: without dropout masks,
and without attention scores, because SDPA computes them again.
"""

from collections.abc import Callable
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
    """Queries, keys, values, result of attention (`size` bytes a number), fp32 normalizers."""
    num_values = 2 * (architecture.query_size + architecture.key_value_size)
    return num_values * size + 4 * architecture.num_attention_heads


def rms_norm_bytes(width: int, size: int, *, fused: bool) -> int:
    """Input of an RMSNorm, which it saves; unfused, as on CPUs, two fp32 copies instead."""
    return width * size if fused else 2 * width * 4


def plain_layer(architecture: Architecture, *, size: int, fused_norm: bool) -> SavedActivations:
    """Bytes per token of a layer with LayerNorms and an MLP without a gate.

    LayerNorm is one kernel on all devices and saves its input. The MLP saves the input and the
    output of its activation. See `gated_layer` for attention and the arguments.
    """
    attention = attention_bytes(architecture, size)
    inner = architecture.intermediate_size * size
    return SavedActivations(
        states=2 * architecture.hidden_size * size,
        gathered=2 * architecture.hidden_size * size,
        split=attention + 2 * inner,
        products=attention + inner,
    )


def gated_layer(architecture: Architecture, *, size: int, fused_norm: bool) -> SavedActivations:
    """Bytes per token of a layer with RMSNorms and a gated MLP.

    Both norms save their inputs; their outputs are the inputs of projections. Attention saves
    queries, keys, values, its result and normalizers. The MLP saves the gate, its SiLU, the up
    projection and their product.

    Args:
        size: bytes per number of the forward pass.
        fused_norm: whether the device has RMSNorm as one kernel.
    """
    attention, hidden = attention_bytes(architecture, size), architecture.hidden_size
    inner = architecture.intermediate_size * size
    return SavedActivations(
        states=2 * rms_norm_bytes(hidden, size, fused=fused_norm),
        gathered=2 * hidden * size,
        split=attention + 4 * inner,
        products=attention + 2 * inner,
    )


def decoder_layer(
    architecture: Architecture,
    *,
    size: int,
    fused_norm: bool,
    encoder_tokens: float,
    of_layer: Callable[..., SavedActivations],
) -> SavedActivations:
    """Bytes per token of a decoder's layer, which has cross-attention.

    Cross-attention saves the input of its norm and of its queries, queries, result and normalizers,
    and keys and values of the encoder's tokens. All layers share the states of the encoder.

    Args:
        encoder_tokens: tokens of the encoder for each token of the decoder.
        of_layer: bytes per token of a layer without cross-attention.
    """
    layer = of_layer(architecture, size=size, fused_norm=fused_norm)
    cross = 2 * architecture.query_size * size + 4 * architecture.num_attention_heads
    cross += round(encoder_tokens * 2 * architecture.key_value_size * size)
    return SavedActivations(
        states=layer.states + layer.states // 2,  # three norms instead of two
        gathered=layer.gathered + architecture.hidden_size * size,
        split=layer.split + cross,
        products=layer.products + cross,
    )
