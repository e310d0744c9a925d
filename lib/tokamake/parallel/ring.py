"""Causal attention over a ring of ranks: keys and values go round, queries stay.

Ring attention (arXiv 2310.01889) over the zigzag shares of `context`: each step attends to the keys
of one rank, and results are merged by their log-sum-exp. Backward sends keys and values round once
more, and their gradients with them, in fp32.
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
from tokamake.parallel.context import Documents
from tokamake.parallel.kernels import AttentionBlock, kernel

_KEYS_AND_VALUES, _GRADIENTS = 0, 1
"""Tags of messages; both kinds are under way at once."""


def ring(
    q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, *, axis: Axis, documents: Documents | None
) -> Tensor:
    """Attention of a rank's queries to all tokens before them; see `attention.attention`."""
    assert q_BHLK.dtype == k_BGLK.dtype == v_BGLK.dtype
    y_BHLK: Tensor = _Ring.apply(q_BHLK, k_BGLK, v_BGLK, axis, documents)
    return y_BHLK


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHLK: Tensor,
        k_BGLK: Tensor,
        v_BGLK: Tensor,
        axis: Axis,
        documents: Documents | None,
    ) -> Tensor:
        """(B, H, L, K) values in the dtype of the queries, summed in fp32 at least."""
        wide = torch.promote_types(q_BHLK.dtype, torch.float32)
        y_BHLK = torch.zeros_like(q_BHLK, dtype=wide, memory_format=torch.contiguous_format)
        lse_BHL = y_BHLK.new_full(y_BHLK.shape[:3], -torch.inf)
        for peer, kv in _round(torch.stack((k_BGLK, v_BGLK)), axis):
            for part in _parts(axis, peer, q_BHLK.shape[2], documents):
                block = part.block(q_BHLK, kv, documents)
                y, lse = kernel(block).forward(block)
                _merge(y_BHLK[:, :, part.queries], lse_BHL[:, :, part.queries], y, lse)
        y_BHLK = y_BHLK.to(q_BHLK.dtype)
        ctx.save_for_backward(q_BHLK, k_BGLK, v_BGLK, y_BHLK, lse_BHL)
        ctx.axis, ctx.documents = axis, documents
        return y_BHLK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHLK: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of this rank's queries, keys and values, summed likewise."""
        q_BHLK, k_BGLK, v_BGLK, y_BHLK, lse_BHL = ctx.saved_tensors
        dq_BHLK = torch.zeros_like(q_BHLK, dtype=lse_BHL.dtype)
        coming: _Message | None = None
        for peer, kv in _round(torch.stack((k_BGLK, v_BGLK)), ctx.axis):
            found = []
            for part in _parts(ctx.axis, peer, q_BHLK.shape[2], ctx.documents):
                block = part.block(q_BHLK, kv, ctx.documents)
                rows = (x[:, :, part.queries] for x in (dy_BHLK, y_BHLK, lse_BHL))
                dq, *of_keys = kernel(block).backward(block, *rows)
                dq_BHLK[:, :, part.queries] += dq
                found.append((part.keys, of_keys))
            # What ranks before this one found for the same keys arrives while this one computes.
            dkv = torch.zeros_like(kv, dtype=lse_BHL.dtype) if coming is None else coming.wait()
            for keys, of_keys in found:
                for total, gradient in zip(dkv, of_keys, strict=True):
                    total[:, :, keys] += gradient
            coming = _Message(dkv, ctx.axis, _GRADIENTS)
        assert coming is not None
        dk_BGLK, dv_BGLK = coming.wait().to(k_BGLK.dtype)
        return dq_BHLK.to(q_BHLK.dtype), dk_BGLK, dv_BGLK, None, None


def _merge(y_BHLK: Tensor, lse_BHL: Tensor, new_y_BHLK: Tensor, new_lse_BHL: Tensor) -> None:
    """Add a block of keys to a running softmax, in place."""
    weight_BHL = torch.sigmoid(new_lse_BHL - lse_BHL)
    y_BHLK.lerp_(new_y_BHLK.to(y_BHLK.dtype), weight_BHL[..., None])
    lse_BHL.copy_(torch.logaddexp(lse_BHL, new_lse_BHL))


@dataclass(frozen=True)
class _Part:
    """Queries of a rank and keys of another, as slices of the tokens that they hold."""

    queries: slice
    keys: slice
    causal: bool = False
    chunks: tuple[int, int] | None = None
    """Chunk of the queries and of the keys, where some of their tokens are of other documents."""

    def block(self, q_BHLK: Tensor, kv: Tensor, documents: Documents | None) -> AttentionBlock:
        """What to compute; `kv` holds keys and values (2, B, G, L, K)."""
        bias = None
        if self.chunks is not None:
            assert documents is not None
            bias = documents.bias(*self.chunks, q_BHLK.dtype)
        keys, values = kv[:, :, :, self.keys]
        return AttentionBlock(q_BHLK[:, :, self.queries], keys, values, self.causal, bias)


def _parts(axis: Axis, peer: int, length: int, documents: Documents | None) -> list[_Part]:
    """What a rank computes of a peer's keys; nothing that causality or documents leave empty."""
    head, tail, both = slice(length // 2), slice(length // 2, length), slice(length)
    if documents is not None:
        return _document_parts(axis, peer, (head, tail), documents)
    if peer == axis.rank:
        return [_Part(both, both, causal=True)]
    # Of ranks before this one, all queries see the first chunk; of those after it, the second
    # chunk's queries see both.
    return [_Part(both, head) if peer < axis.rank else _Part(tail, both)]


def _document_parts(
    axis: Axis, peer: int, halves: tuple[slice, slice], documents: Documents
) -> list[_Part]:
    """The same chunk by chunk, as documents mostly leave but those near the diagonal."""
    last, found = 2 * axis.size - 1, []
    for queries, query in zip(halves, (axis.rank, last - axis.rank), strict=True):
        for keys, key in zip(halves, (peer, last - peer), strict=True):
            relation = documents.relations[query][key]
            if key > query or relation == "apart":
                continue
            mixed = relation == "mixed"
            chunks = (query, key) if mixed else None
            found.append(_Part(queries, keys, query == key and not mixed, chunks))
    return found


def _round(kv: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Each rank with its keys and values, one's own first; the next are under way meanwhile."""
    for step in range(axis.size):
        coming = _Message(kv, axis, _KEYS_AND_VALUES) if step + 1 < axis.size else None
        yield (axis.rank - step) % axis.size, kv
        if coming is not None:
            kv = coming.wait()


class _Message:
    """A tensor on its way to the next rank, and that of the rank before on its way here."""

    def __init__(self, sent: Tensor, axis: Axis, tag: int) -> None:
        # Held until they have gone and come.
        self.sent, self.received = sent, torch.empty_like(sent)
        after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=axis.group, group_peer=after, tag=tag),
                dist.P2POp(dist.irecv, self.received, group=axis.group, group_peer=before, tag=tag),
            ]
        )

    def wait(self) -> Tensor:
        """The tensor that came."""
        for work in self.works:
            work.wait()
        return self.received
