"""Rules of attention that torch's own attention does not have: windows, caps and sinks.

A window hides far tokens, so that blocks of queries need slices of the keys alone: faster than a
mask of all scores. A cap needs the scores themselves, in the plain arithmetic of `ring_kernels`. A
sink is a score without a key: the log-sum-exp of a kernel is enough to add it.
Shape suffixes: B batch, L tokens, S tokens attended to, H query heads, G key and value heads, K
width of a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tokamake.parallel.ring_kernels import AttentionBlock, kernel
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
    sinks: Tensor | None = None
    """(H,) a further score of each head, which takes weight from the tokens and has no value."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention computes the scores."""
        return self.window is None and self.drop is None and not self.needs_scores

    @property
    def needs_scores(self) -> bool:
        """Whether scores, or their log-sum-exp, must be at hand."""
        return self.softcap != 0 or self.sinks is not None

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
    """Compute causal attention with a window, a cap or sinks, block by block of queries.

    Args:
        k_BGSK: keys; queries are the last L of these places.
        mask: (B, 1, L, S) bool that hides further keys; None: it hides none.
    """
    length, total = q_BHLK.shape[2], k_BGSK.shape[2]
    if mask is None and rules.window is None and length == total:
        return _by_scores(q_BHLK, k_BGSK, v_BGSK, None, rules)
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
        values.append(masked(*block, visible, rules))
    return values[0] if len(values) == 1 else torch.cat(values, 2)


def masked(
    q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, visible: Tensor, rules: ScoreRules
) -> Tensor:
    """Attention by a bool mask, (L, S) or (B, 1, L, S); each query sees some key."""
    if rules.needs_scores:
        return _by_scores(q_BHLK, k_BGSK, v_BGSK, visible, rules)
    grouped = q_BHLK.shape[1] != k_BGSK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHLK, k_BGSK, v_BGSK, attn_mask=visible, enable_gqa=grouped
    )


@not_compiled
def _by_scores(
    q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, visible: Tensor | None, rules: ScoreRules
) -> Tensor:
    tensors = q_BHLK, k_BGSK, v_BGSK, rules.sinks
    y_BHLK: Tensor = _ByScores.apply(*tensors, visible, rules.softcap)
    return y_BHLK


class _ByScores(torch.autograd.Function):
    """Attention by a kernel that returns the log-sum-exp of scores.

    `visible` is None for causal attention, which then needs no mask in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        visible: Tensor | None,
        softcap: float,
    ) -> Tensor:
        """Return (B, H, L, K) in the dtype of the queries; sums are fp32 or wider."""
        block = _block(q, k, v, visible, softcap)
        y, lse = kernel(block).forward(block)
        if sinks is not None:
            y, lse = with_sinks(y, lse, sinks)
        # Token by token in memory, so that the output projection takes it without a copy.
        y = y.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, sinks, visible, y, lse)
        ctx.softcap = softcap
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and sinks."""
        q, k, v, sinks, visible, y, lse = ctx.saved_tensors
        block = _block(q, k, v, visible, ctx.softcap)
        gradients = kernel(block).backward(block, dy, y, lse)
        of_sinks = None if sinks is None else gradient_of_sinks(dy, y, lse, sinks)
        return *(gradient.to(q.dtype) for gradient in gradients), of_sinks, None, None


def with_sinks(y_BHLK: Tensor, lse_BHL: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Results of attention and log-sum-exp of scores, with a further score of each head."""
    sinks_HL = sinks_H.to(lse_BHL.dtype)[:, None]
    share_BHL = torch.sigmoid(lse_BHL - sinks_HL)
    return y_BHLK * share_BHL[..., None], torch.logaddexp(lse_BHL, sinks_HL)


def gradient_of_sinks(dy_BHLK: Tensor, y_BHLK: Tensor, lse_BHL: Tensor, sinks_H: Tensor) -> Tensor:
    """Gradient of the scores that `with_sinks` added; y and lse are its results.

    The gradient of a score is its weight times (gradient of the weight - the mean of these over all
    weights); a sink has no value, so the gradient of its weight is 0.
    """
    weight_BHL = torch.exp(sinks_H.to(lse_BHL.dtype)[:, None] - lse_BHL)
    mean_BHL = (dy_BHLK.to(lse_BHL.dtype) * y_BHLK).sum(-1)
    return -(weight_BHL * mean_BHL).sum((0, 2)).to(sinks_H.dtype)


def _block(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, softcap: float
) -> AttentionBlock:
    if visible is None:
        return AttentionBlock(q, k, v, causal=True, softcap=softcap)
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
    # Not -inf: kernels compute blocks of keys, and some would have no visible key.
    bias = bias.masked_fill_(~visible, torch.finfo(q.dtype).min / 2)
    if bias.dim() == 2:
        bias = bias[None, None]
    return AttentionBlock(q, k, v, bias=bias, softcap=softcap)
