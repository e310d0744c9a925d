"""Causal attention of a layer, whose tokens may be shared over context-parallel ranks.

Queries, keys and values of a rank's tokens come from the model's layers, values go back to them; on
one rank it is torch's own attention. How tokens are shared: `context`.
Shape suffixes: B batch, L tokens of a rank, S tokens attended to, H query heads, G key and value
heads, K width of a head, C ranks.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tokamake.parallel.axis import Axis
from tokamake.parallel.context import (
    Documents,
    Method,
    PackedDocuments,
    by_rank,
    check_heads,
    in_order,
)
from tokamake.parallel.document_attention import by_document
from tokamake.parallel.ring import ring

Seen = Tensor | PackedDocuments | Documents | None
"""What tokens see of those before them, see `attention`."""


def attention(
    q_BHLK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    *,
    axis: Axis,
    method: Method = "ring",
    mask: Seen = None,
) -> Tensor:
    """Mix tokens: each sees itself and those before it, on other ranks too.

    All ranks of the axis call it alike, in forward and in backward.

    Args:
        q_BHLK: (B, H, L, K) queries of this rank's `context.share` of tokens.
        k_BGSK: (B, G, S, K) keys; H is a multiple of G. On one rank, keys of tokens before the
            first query may precede; else S is L.
        v_BGSK: (B, G, S, K) values.
        axis: the context-parallel ranks.
        method: "ring" passes keys and values round; "ulysses" (arXiv 2309.14509) exchanges tokens
            for heads and back.
        mask: what tokens see of those before them: from `context.document_mask`, or on one rank
            any (B, 1, L, S) bool or bias of scores; none: all.

    Returns:
        (B, H, L, K) in the dtype of the queries.

    Raises:
        UserError: there are too few heads for "ulysses".
    """
    if q_BHLK.device.type == "cpu" and q_BHLK.dtype == torch.float16:
        # CPUs take five times longer for fp16 than for fp32.
        q_BHLK, k_BGSK, v_BGSK = q_BHLK.float(), k_BGSK.float(), v_BGSK.float()
        if isinstance(mask, Tensor) and mask.is_floating_point():
            mask = mask.float()
        wide = attention(q_BHLK, k_BGSK, v_BGSK, axis=axis, method=method, mask=mask)
        return wide.half()
    if axis.size == 1:
        assert not isinstance(mask, Documents)
        return _on_one_rank(q_BHLK, k_BGSK, v_BGSK, mask)
    return _on_ranks(q_BHLK, k_BGSK, v_BGSK, axis=axis, method=method, mask=mask)


def _on_one_rank(
    q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | PackedDocuments | None
) -> Tensor:
    if isinstance(mask, PackedDocuments):
        return by_document(q_BHLK, k_BGSK, v_BGSK, mask)
    length, total = q_BHLK.shape[2], k_BGSK.shape[2]
    if mask is None and 1 < length < total:
        # SDPA's own causal mask would align the first query with the first key.
        mask = q_BHLK.new_ones(length, total, dtype=torch.bool).tril(total - length)
    return F.scaled_dot_product_attention(
        q_BHLK,
        k_BGSK,
        v_BGSK,
        attn_mask=mask,
        is_causal=mask is None and length > 1,
        enable_gqa=q_BHLK.shape[1] != k_BGSK.shape[1],
    )


@torch.compiler.disable
def _on_ranks(
    q_BHLK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    *,
    axis: Axis,
    method: Method,
    mask: Seen,
) -> Tensor:
    assert q_BHLK.shape[2] == k_BGLK.shape[2], "no cache of keys over several ranks"
    if method == "ring":
        assert mask is None or isinstance(mask, Documents)
        return ring(q_BHLK, k_BGLK, v_BGLK, axis=axis, documents=mask)
    assert not isinstance(mask, Documents)
    return _ulysses(q_BHLK, k_BGLK, v_BGLK, axis=axis, mask=mask)


def _ulysses(
    q_BHLK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    *,
    axis: Axis,
    mask: Tensor | PackedDocuments | None,
) -> Tensor:
    heads, groups, size = q_BHLK.shape[1], k_BGLK.shape[1], axis.size
    check_heads(heads, size)
    # As many key heads as the ranks can share, each beside those query heads that it serves.
    repeats = math.lcm(groups, size) // groups
    of_keys = (x.repeat_interleave(repeats, 1) for x in (k_BGLK, v_BGLK))
    by_heads = [x.unflatten(1, (size, -1)) for x in (q_BHLK, *of_keys)]
    qkv = _Exchange.apply(torch.cat(by_heads, 2).transpose(0, 1).contiguous(), axis)
    q, k, v = _whole(qkv).split([x.shape[2] for x in by_heads], 1)
    y_CBHLK = _Exchange.apply(_shares(_on_one_rank(q, k, v, mask), size), axis)
    y_BHLK: Tensor = y_CBHLK.transpose(0, 1).flatten(1, 2)
    return y_BHLK


def _whole(x_CBHLK: Tensor) -> Tensor:
    """(B, H, C × L, K) in the order of tokens, of shares from all ranks."""
    return in_order(x_CBHLK.movedim(0, 2).unflatten(3, (2, -1)), 2).flatten(2, 3)


def _shares(x_BHSK: Tensor, size: int) -> Tensor:
    """(C, B, H, S / C, K): what goes to each rank."""
    chunks = by_rank(x_BHSK.unflatten(2, (2 * size, -1)), 2)
    return chunks.flatten(3, 4).movedim(2, 0).contiguous()


class _Exchange(torch.autograd.Function):
    """Row c of a tensor goes to rank c, and what comes from it takes its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """What comes, (C, …) as what goes."""
        ctx.axis = axis
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x, group=axis.group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The same way back."""
        return _Exchange.apply(gradient.contiguous(), ctx.axis), None
