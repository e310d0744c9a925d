"""Causal ring attention: keys and values move from rank to rank, queries stay.

Ring attention (arXiv 2310.01889) over the zigzag shares of `context`. Each step attends to the keys
of one rank; results are merged by their log-sum-exp. The backward pass sends keys and values
through the ring again, and their gradients in fp32 with them.
Shape suffixes: B batch, L tokens of a rank, H query heads, G key and value heads, K width of a
head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokamake.parallel.axis import Axis
from tokamake.parallel.document_mask import Documents, Relation
from tokamake.parallel.ring_kernels import AttentionBlock, kernel
from tokamake.parallel.score_rules import ScoreRules, gradient_of_sinks, in_window, with_sinks

_KEYS_AND_VALUES, _GRADIENTS = 0, 1
"""Tags of messages, because both kinds are in flight at the same time."""


def ring(
    q_BHLK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    *,
    axis: Axis,
    documents: Documents | None,
    rules: ScoreRules,
) -> Tensor:
    """Compute causal attention over several ranks; see `attention.attention` for the tensors."""
    assert q_BHLK.dtype == k_BGLK.dtype == v_BGLK.dtype
    assert rules.drop is None, "ring attention drops no weights"
    mask = _Mask(documents, rules.within(q_BHLK.shape[2] * axis.size))
    y_BHLK: Tensor = _Ring.apply(q_BHLK, k_BGLK, v_BGLK, rules.sinks, axis, mask)
    return y_BHLK


@dataclass(frozen=True)
class _Mask:
    """Tokens that each token sees among earlier ones; chunks are parts of the whole sequence."""

    documents: Documents | None
    rules: ScoreRules

    @property
    def is_causal_alone(self) -> bool:
        return self.documents is None and self.rules.window is None

    def relation(self, query: int, key: int, length: int) -> Relation:
        """Whether chunks of `length` tokens see none, all or some of each other's places."""
        relation: Relation = "same"
        if self.documents is not None:
            relation = self.documents.relations[query][key]
        if self.rules.window is None or relation == "apart":
            return relation
        nearest, farthest = (query - key - 1) * length + 1, (query - key + 1) * length - 1
        if nearest >= self.rules.window:
            return "apart"
        return relation if farthest < self.rules.window else "mixed"

    def bias(self, query: int, key: int, *, like: Tensor) -> Tensor:
        """Score bias (B, 1, L, L) of two chunks: 0 where a query attends to a key, else very low.

        Not -inf, which would make rows without any key NaN in some kernels. With a very low score,
        such rows get weight 0 when blocks are merged.
        """
        length = like.shape[2] // 2
        queries, keys = (range(n * length, (n + 1) * length) for n in (query, key))
        visible_BLL = in_window(queries, keys, window=self.rules.window, like=like)[None]
        if self.documents is not None:
            visible_BLL = visible_BLL & self.documents.in_same_document(query, key)
        visible_BLL = visible_BLL.expand(len(like), -1, -1)
        bias_BLL = torch.zeros(visible_BLL.shape, dtype=like.dtype, device=like.device)
        return bias_BLL.masked_fill_(~visible_BLL, torch.finfo(like.dtype).min / 2)[:, None]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BGLK: Tensor,
        v_BGLK: Tensor,
        sinks_H: Tensor | None,
        axis: Axis,
        mask: _Mask,
    ) -> Tensor:
        """Return (B, H, L, K) in the dtype of the queries; sums are fp32 or wider."""
        wide = torch.promote_types(q_BHLK.dtype, torch.float32)
        y_BHLK = torch.zeros_like(q_BHLK, dtype=wide, memory_format=torch.contiguous_format)
        lse_BHL = y_BHLK.new_full(y_BHLK.shape[:3], -torch.inf)
        # Keys and values in one tensor: one message a step instead of two.
        for peer, kv in _around_ring(torch.stack((k_BGLK, v_BGLK)), axis):
            for part in _parts(axis, peer, length=q_BHLK.shape[2], mask=mask):
                block = part.block(q_BHLK, kv, mask)
                y, lse = kernel(block).forward(block)
                _merge(y_BHLK[:, :, part.queries], lse_BHL[:, :, part.queries], y, lse)
        if sinks_H is not None:  # once, when the scores of all keys are merged
            y_BHLK, lse_BHL = with_sinks(y_BHLK, lse_BHL, sinks_H)
        y_BHLK = y_BHLK.to(q_BHLK.dtype)
        ctx.save_for_backward(q_BHLK, k_BGLK, v_BGLK, sinks_H, y_BHLK, lse_BHL)
        ctx.axis, ctx.mask = axis, mask
        return y_BHLK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHLK: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's queries, keys, values, and of sinks by its queries.

        Sums are fp32 or wider.
        """
        q_BHLK, k_BGLK, v_BGLK, sinks_H, y_BHLK, lse_BHL = ctx.saved_tensors
        dq_BHLK = torch.zeros_like(q_BHLK, dtype=lse_BHL.dtype)
        message: _Message | None = None
        for peer, kv in _around_ring(torch.stack((k_BGLK, v_BGLK)), ctx.axis):
            dkv_of_parts = []
            for part in _parts(ctx.axis, peer, length=q_BHLK.shape[2], mask=ctx.mask):
                block = part.block(q_BHLK, kv, ctx.mask)
                rows = (x[:, :, part.queries] for x in (dy_BHLK, y_BHLK, lse_BHL))
                dq, *dkv_of_part = kernel(block).backward(block, *rows)
                dq_BHLK[:, :, part.queries] += dq
                dkv_of_parts.append((part.keys, dkv_of_part))
            # The gradients of the same keys from earlier ranks arrive while this one computes.
            dkv = torch.zeros_like(kv, dtype=lse_BHL.dtype) if message is None else message.wait()
            for keys, dkv_of_part in dkv_of_parts:
                for total, gradient in zip(dkv, dkv_of_part, strict=True):
                    total[:, :, keys] += gradient
            message = _Message(dkv, ctx.axis, tag=_GRADIENTS)
        assert message is not None
        dk_BGLK, dv_BGLK = message.wait().to(k_BGLK.dtype)
        dsinks_H = None if sinks_H is None else gradient_of_sinks(dy_BHLK, y_BHLK, lse_BHL, sinks_H)
        return dq_BHLK.to(q_BHLK.dtype), dk_BGLK, dv_BGLK, dsinks_H, None, None


def _merge(y_BHLK: Tensor, lse_BHL: Tensor, new_y_BHLK: Tensor, new_lse_BHL: Tensor) -> None:
    """Add the result of a block of keys to a running softmax, in place."""
    # exp(new) / (exp(new) + exp(old)). Only the difference is exponentiated, so nothing overflows;
    # at first lse is -inf, and the weight of the first block 1.
    weight_BHL = torch.sigmoid(new_lse_BHL - lse_BHL)
    y_BHLK.lerp_(new_y_BHLK.to(y_BHLK.dtype), weight_BHL[..., None])
    lse_BHL.copy_(torch.logaddexp(lse_BHL, new_lse_BHL))


@dataclass(frozen=True)
class _QueryKeySlices:
    """Queries of this rank and keys of a peer, as slices of the tokens of each."""

    queries: slice
    keys: slice
    causal: bool = False
    chunks: tuple[int, int] | None = None
    """Numbers of the chunks of queries and keys if their mask needs a bias, else None."""

    def block(self, q_BHLK: Tensor, kv: Tensor, mask: _Mask) -> AttentionBlock:
        """The block of attention to compute; `kv` holds keys and values, (2, B, G, L, K)."""
        bias = None if self.chunks is None else mask.bias(*self.chunks, like=q_BHLK)
        keys, values = kv[:, :, :, self.keys]
        queries, softcap = q_BHLK[:, :, self.queries], mask.rules.softcap
        return AttentionBlock(queries, keys, values, self.causal, bias, softcap)


def _parts(axis: Axis, peer: int, *, length: int, mask: _Mask) -> list[_QueryKeySlices]:
    """Parts of a peer's keys that this rank attends to, without fully masked parts."""
    head, tail, both = slice(length // 2), slice(length // 2, length), slice(length)
    if not mask.is_causal_alone:
        return _masked_parts(axis, peer, halves=(head, tail), mask=mask)
    if peer == axis.rank:
        return [_QueryKeySlices(both, both, causal=True)]
    # If the peer comes first, all queries attend to its first chunk only. If it comes later, the
    # queries of the second chunk attend to both of its chunks.
    return [_QueryKeySlices(both, head) if peer < axis.rank else _QueryKeySlices(tail, both)]


def _masked_parts(
    axis: Axis, peer: int, *, halves: tuple[slice, slice], mask: _Mask
) -> list[_QueryKeySlices]:
    """Compute `_parts` chunk by chunk: documents and windows hide most chunks off the diagonal."""
    last, parts = 2 * axis.size - 1, []
    for queries, query in zip(halves, (axis.rank, last - axis.rank), strict=True):
        for keys, key in zip(halves, (peer, last - peer), strict=True):
            relation = mask.relation(query, key, halves[0].stop)
            if key > query or relation == "apart":
                continue
            mixed = relation == "mixed"
            chunks = (query, key) if mixed else None
            parts.append(_QueryKeySlices(queries, keys, query == key and not mixed, chunks))
    return parts


def _around_ring(kv: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank with its keys and values, this rank first; the next ones arrive meanwhile."""
    for step in range(axis.size):
        message = _Message(kv, axis, tag=_KEYS_AND_VALUES) if step + 1 < axis.size else None
        yield (axis.rank - step) % axis.size, kv
        if message is not None:
            kv = message.wait()


class _Message:
    """Send a tensor to the next rank and receive the previous rank's, asynchronously."""

    def __init__(self, sent: Tensor, axis: Axis, *, tag: int) -> None:
        # Both tensors must live until the transfers end.
        self.axis, self.sent, self.received = axis, sent, torch.empty_like(sent)
        axis.sends(sent)
        after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=axis.group, group_peer=after, tag=tag),
                dist.P2POp(dist.irecv, self.received, group=axis.group, group_peer=before, tag=tag),
            ]
        )

    def wait(self) -> Tensor:
        """Wait for both transfers and return the received tensor."""
        for work in self.works:
            work.wait()
        self.axis.received(self.received)
        return self.received
