"""Rules of attention scores that fused kernels do not have: windows and caps.

A window hides far tokens, so that blocks of queries need slices of the keys alone: faster than a
mask of all scores. A cap needs the scores themselves, in the plain arithmetic of `ring_kernels`.
Shape suffixes: B batch, L tokens, S tokens attended to, H query heads, G key and value heads, K
width of a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tokamake.parallel.ring_kernels import AttentionBlock, Plain
from tokamake.runtime.torch_internals import not_compiled

_FEWEST = 128
"""Least number of queries of a block: fewer cost more calls than they save scores."""


class ScoreRules(NamedTuple):
    """How scores become weights of attention, beside the mask."""

    window: int | None = None
    """A token sees itself and the `window` - 1 tokens before it; None: all of them."""
    softcap: float = 0.0
    """c: scores become c · tanh(score / c) before the mask; 0: they stay."""
    drop: Callable[[Tensor], Tensor] | None = None
    """Drops some of the (B, H, S, S) weights. Without it, no weights exist."""

    def within(self, total: int) -> "ScoreRules":
        """The same rules for `total` tokens, without a window that hides none of them."""
        is_wide = self.window is None or self.window >= total
        return self._replace(window=None) if is_wide else self


PLAIN_SCORES = ScoreRules()


def in_window(queries: range, keys: range, *, window: int | None, like: Tensor) -> Tensor:
    """(queries, keys) bool: whether a place sees a place, itself or earlier and in the window."""
    places = [torch.arange(each.start, each.stop, device=like.device) for each in (queries, keys)]
    distances = places[0][:, None] - places[1]
    visible = distances >= 0
    return visible if window is None else visible & (distances < window)


def by_blocks(
    q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, rules: ScoreRules
) -> Tensor:
    """Compute causal attention with a window or a cap, block by block of queries.

    Args:
        k_BGSK: keys; queries are the last L of these places.
        mask: (B, 1, L, S) bool that hides further keys; None: it hides none.
    """
    length, total = q_BHLK.shape[2], k_BGSK.shape[2]
    if mask is None and rules.window is None and length == total:
        return _capped(q_BHLK, k_BGSK, v_BGSK, None, rules.softcap)
    size = length if rules.window is None else max(rules.window, _FEWEST)
    values = []
    for start in range(0, length, size):
        rows = range(start, min(start + size, length))
        places = range(rows.start + total - length, rows.stop + total - length)
        first = 0 if rules.window is None else max(0, places.start - rules.window + 1)
        seen = slice(first, places.stop)
        visible = in_window(places, range(first, places.stop), window=rules.window, like=q_BHLK)
        if mask is not None:
            visible = visible & mask[:, :, rows.start : rows.stop, seen]
        block = q_BHLK[:, :, rows.start : rows.stop], k_BGSK[:, :, seen], v_BGSK[:, :, seen]
        values.append(masked(*block, visible, softcap=rules.softcap))
    return values[0] if len(values) == 1 else torch.cat(values, 2)


def masked(
    q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, visible: Tensor, *, softcap: float
) -> Tensor:
    """Attention by a bool mask, (L, S) or (B, 1, L, S); each query sees some key."""
    if softcap:
        return _capped(q_BHLK, k_BGSK, v_BGSK, visible, softcap)
    grouped = q_BHLK.shape[1] != k_BGSK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHLK, k_BGSK, v_BGSK, attn_mask=visible, enable_gqa=grouped
    )


@not_compiled
def _capped(
    q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, visible: Tensor | None, softcap: float
) -> Tensor:
    y_BHLK: Tensor = _Capped.apply(q_BHLK, k_BGSK, v_BGSK, visible, softcap)
    return y_BHLK


class _Capped(torch.autograd.Function):
    """Attention with capped scores, which the backward pass computes again.

    `visible` is None for causal attention, which then needs no mask in memory.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, softcap: float
    ) -> Tensor:
        """Return (B, H, L, K) in the dtype of the queries; sums are fp32 or wider."""
        y, lse = Plain.forward(_block(q, k, v, visible, softcap))
        # Token by token in memory, so that the output projection takes it without a copy.
        y = y.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, visible, y, lse)
        ctx.softcap = softcap
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, visible, y, lse = ctx.saved_tensors
        gradients = Plain.backward(_block(q, k, v, visible, ctx.softcap), dy, y, lse)
        return *(gradient.to(q.dtype) for gradient in gradients), None, None


def _block(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, softcap: float
) -> AttentionBlock:
    if visible is None:
        return AttentionBlock(q, k, v, causal=True, softcap=softcap)
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill_(~visible, -torch.inf)
    if bias.dim() == 2:
        bias = bias[None, None]
    return AttentionBlock(q, k, v, bias=bias, softcap=softcap)
