"""Layers of a Llama for one new token of each sequence, on a CPU.

A layer is four matrix products and three calls of C++ (`lib/csrc/decode.hpp`). In single operations
of torch, starting them takes longer than the work if a model is small.
Shape suffixes: N sequences, D hidden size, E width of a projection, K width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tokamake import _csrc
from tokamake.models.common.key_value_cache import KeyValueCache
from tokamake.models.common.layers import Attention, GatedMLP, TransformerLayer
from tokamake.parallel.linear import linear
from tokamake.parallel.tensor import RMSNorm

_LONGEST = 1024
"""Tokens of the longest sequence; beyond, torch's threads are worth their start."""
_MOST = 8192
"""Max padded tokens (rows times longest); beyond, torch's threads are worth their start."""


def applies(layers: Sequence[nn.Module], x: Tensor, *, cache: KeyValueCache) -> bool:
    """Whether `decode` computes a pass: one token a row, in fp32 on a CPU, of plain layers."""
    this = cache.this_pass
    return (
        cache.is_kept
        and this.width == 1
        and set(this.counts) == {1}
        and this.span <= _LONGEST
        and this.span * len(this.counts) <= _MOST
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and all(_is_plain(layer, this.span) for layer in layers)
    )


def _is_plain(layer: nn.Module, span: int) -> bool:
    """Whether a layer has joined projections, RMS norms, no norms of heads, and no peers.

    It also rotates whole heads, and its window hides none of `span` tokens.
    """
    if type(layer) is not TransformerLayer:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    return (
        isinstance(layer.input_layernorm, RMSNorm)
        and isinstance(attention, Attention)
        and attention.qkv_proj is not None
        and attention.is_alone
        and attention.rotates_whole_heads
        and (attention.window is None or attention.window >= span)
        and isinstance(attention.q_norm, nn.Identity)
        and isinstance(mlp, GatedMLP)
        and mlp.gate_up_proj is not None
    )


def decode(
    layers: Sequence[nn.Module], x: Tensor, cos: Tensor, sin: Tensor, *, cache: KeyValueCache
) -> Tensor:
    """Pass states through layers; the new tokens extend the cache.

    Args:
        x: (N, 1, D) states, as the result.
        cos: (1, K) cosines of the positions, or (N, 1, 1, K).
    """
    this = cache.this_pass
    rows, _, hidden = x.shape
    states, normed = x.reshape(rows, hidden).clone(), x.new_empty(rows, hidden)
    cosines, sines = (
        angles.reshape(-1, angles.shape[-1]).expand(rows, -1).contiguous() for angles in (cos, sin)
    )
    lengths = torch.tensor(this.starts)
    update: Tensor | None = None
    for layer, layer_cache in zip(layers, cache.layers, strict=True):
        assert isinstance(layer, TransformerLayer)
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(mlp, GatedMLP)
        qkv, gate_up = attention.qkv_proj, mlp.gate_up_proj
        assert qkv is not None
        assert gate_up is not None
        heads, groups, width = attention.sizes
        keys, values = layer_cache.with_room(groups, width, like=x, window=attention.window)
        _add_norm(states, update, norm=layer.input_layernorm, normed=normed)
        projected = linear(normed, qkv.weight, qkv.bias)
        mixed = x.new_empty(rows, heads * width)
        row_stride, group_stride = keys.stride()[:2]
        first = 4 * this.first * row_stride  # bytes
        _csrc.attend(
            projected.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            keys.data_ptr() + first,
            values.data_ptr() + first,
            row_stride,
            group_stride,
            lengths.data_ptr(),
            rows,
            heads,
            groups,
            width,
            mixed.data_ptr(),
        )
        update = linear(mixed, attention.o_proj.weight, attention.o_proj.bias)
        _add_norm(states, update, norm=layer.post_attention_layernorm, normed=normed)
        projected = linear(normed, gate_up.weight, gate_up.bias)
        gated = x.new_empty(rows, projected.shape[1] // 2)
        _csrc.gate(projected.data_ptr(), rows, gated.shape[1], gated.data_ptr())
        update = linear(gated, mlp.down_proj.weight, mlp.down_proj.bias)
    return (states if update is None else states.add_(update)).unsqueeze(1)


def _add_norm(states: Tensor, update: Tensor | None, *, norm: nn.Module, normed: Tensor) -> None:
    """Add an update to the states; write their norms."""
    assert isinstance(norm, RMSNorm)
    rows, width = states.shape
    address = 0 if update is None else update.data_ptr()
    eps = float(norm.eps or 0.0)
    _csrc.add_rms_norm(
        states.data_ptr(), address, norm.weight.data_ptr(), eps, rows, width, normed.data_ptr()
    )
