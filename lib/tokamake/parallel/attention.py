"""Attention, with the tokens of a sequence on one rank or over context-parallel ranks.

It is causal unless the mask says otherwise: encoders read a sequence in both directions. A layer of
the model passes the queries, keys and values of this rank's tokens. On one rank this is torch's own
attention. `context` describes how ranks share tokens.
Documents of a packed sample: on CUDA, flash attention takes all documents in one call. A CPU
computes one document after the other, which is faster than to mask the scores of other documents.
In all other cases, a mask is used. `score_rules` has windows and capped scores.
Shape suffixes: B batch, L tokens of a rank, T tokens of the batch, S tokens attended to, H query
heads, G key and value heads, K width of a head, C ranks.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tokamake.parallel.axis import Axis
from tokamake.parallel.context import Method, by_rank, check_heads, in_order
from tokamake.parallel.document_mask import UNMASKED, Documents, PackedDocuments, Unmasked
from tokamake.parallel.ring import ring
from tokamake.parallel.score_rules import PLAIN_SCORES, ScoreRules, by_blocks, in_window
from tokamake.runtime.device_types import device_type, varlen_arguments
from tokamake.runtime.torch_internals import not_compiled

AttentionMask = Tensor | PackedDocuments | Documents | Unmasked | None
"""The mask argument of `attention`."""

_SHORT = 32
"""Mean length of documents in tokens below which a call for each costs more than a mask."""
_WIDEST = 256
"""Largest width of a head that flash attention supports."""


def attention(
    q_BHLK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    *,
    axis: Axis,
    method: Method = "ring",
    mask: AttentionMask = None,
    rules: ScoreRules = PLAIN_SCORES,
) -> Tensor:
    """Compute attention: a token attends to itself and all tokens before it, or as `mask` says.

    This is a collective: all ranks of the axis must call it, in forward and in backward.

    Args:
        q_BHLK: (B, H, L, K) floating-point queries of this rank's `context.share` of tokens.
        k_BGSK: (B, G, S, K) keys, in the same dtype as the values; H is a multiple of G. S equals
            L, except on one rank, where keys of earlier tokens (a cache) may come first.
        method: "ring" passes keys and values from rank to rank; "ulysses" (arXiv 2309.14509)
            exchanges tokens for heads and back.
        mask: None: causal. The result of `document_mask` limits attention further. On one
            rank, a (B, 1, L, S) bool mask or score bias replaces the causal mask, and `UNMASKED`
            lets a token attend to all tokens.
        rules: window, cap, sinks and dropout; no dropout with "ring". A window, a cap and sinks
            need causal attention.

    Returns:
        (B, H, L, K) in the dtype of the queries.

    Raises:
        UserError: "ulysses" cannot divide the heads among the ranks.
    """
    if q_BHLK.device.type == "cpu" and q_BHLK.dtype == torch.float16:
        # On CPUs, fp16 takes five times as long as fp32.
        q_BHLK, k_BGSK, v_BGSK = q_BHLK.float(), k_BGSK.float(), v_BGSK.float()
        if isinstance(mask, Tensor) and mask.is_floating_point():
            mask = mask.float()
        wide = attention(q_BHLK, k_BGSK, v_BGSK, axis=axis, method=method, mask=mask, rules=rules)
        return wide.half()
    if axis.size == 1:
        assert not isinstance(mask, Documents)
        return _on_one_rank(q_BHLK, k_BGSK, v_BGSK, mask, rules)
    assert not isinstance(mask, Unmasked), "ranks that share a sequence compute causal attention"
    return _on_ranks(q_BHLK, k_BGSK, v_BGSK, axis=axis, method=method, mask=mask, rules=rules)


def _on_one_rank(
    q_BHLK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    mask: Tensor | PackedDocuments | Unmasked | None,
    rules: ScoreRules,
) -> Tensor:
    length, total = q_BHLK.shape[2], k_BGSK.shape[2]
    rules = rules.within(total)
    if rules.drop:
        return _dropped(q_BHLK, k_BGSK, v_BGSK, mask, rules)
    if isinstance(mask, PackedDocuments):
        return by_document(q_BHLK, k_BGSK, v_BGSK, mask, rules)
    if not rules.is_plain:
        assert not isinstance(mask, Unmasked)
        if mask is None and length == total and not rules.needs_scores and _at_once(q_BHLK):
            return _flash_rows(q_BHLK, k_BGSK, v_BGSK, rules)
        return by_blocks(q_BHLK, k_BGSK, v_BGSK, mask, rules)
    if mask is None and 1 < length < total:
        # SDPA's causal mask aligns the first query with the first key; a cache needs the last ones
        # aligned.
        mask = q_BHLK.new_ones(length, total, dtype=torch.bool).tril(total - length)
    return F.scaled_dot_product_attention(
        q_BHLK,
        k_BGSK,
        v_BGSK,
        attn_mask=None if isinstance(mask, Unmasked) else mask,
        is_causal=mask is None and length > 1,
        enable_gqa=q_BHLK.shape[1] != k_BGSK.shape[1],
    )


def _dropped(
    q_BHSK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    mask: Tensor | PackedDocuments | Unmasked | None,
    rules: ScoreRules,
) -> Tensor:
    """Attention whose weights exist, so that some can be dropped: memory grows with S squared."""
    repeats = q_BHSK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSK = (x.repeat_interleave(repeats, 1) for x in (k_BGSK, v_BGSK))
    # Queries are scaled first: a product of fp16 could overflow.
    scores_BHSS = ((q_BHSK / math.sqrt(q_BHSK.shape[-1])) @ k_BHSK.mT).float()
    if rules.softcap:
        scores_BHSS = rules.softcap * torch.tanh(scores_BHSS / rules.softcap)
    if isinstance(mask, PackedDocuments):
        mask = mask.mask
    if mask is None or rules.window is not None:
        assert not isinstance(mask, Unmasked)
        places = range(scores_BHSS.shape[-1])
        seen = in_window(places, places, window=rules.window, like=scores_BHSS)
        mask = seen if mask is None else seen & mask
    if not isinstance(mask, Unmasked):
        is_bias = mask.is_floating_point()
        scores_BHSS = scores_BHSS + mask if is_bias else scores_BHSS.masked_fill(~mask, -torch.inf)
    assert rules.drop is not None
    weights_BHSS = scores_BHSS.softmax(-1)
    if rules.sinks is not None:
        lse_BHS1 = scores_BHSS.logsumexp(-1, keepdim=True)
        weights_BHSS = weights_BHSS * torch.sigmoid(lse_BHS1 - rules.sinks.float()[:, None, None])
    return rules.drop(weights_BHSS).to(v_BHSK.dtype) @ v_BHSK


@not_compiled
def _on_ranks(
    q_BHLK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    *,
    axis: Axis,
    method: Method,
    mask: AttentionMask,
    rules: ScoreRules,
) -> Tensor:
    assert q_BHLK.shape[2] == k_BGLK.shape[2], "several ranks support no cache of keys"
    if method == "ring":
        assert mask is None or isinstance(mask, Documents)
        return ring(q_BHLK, k_BGLK, v_BGLK, axis=axis, documents=mask, rules=rules)
    assert not isinstance(mask, Documents | Unmasked)
    return _ulysses(q_BHLK, k_BGLK, v_BGLK, axis=axis, mask=mask, rules=rules)


def _ulysses(
    q_BHLK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    *,
    axis: Axis,
    mask: Tensor | PackedDocuments | None,
    rules: ScoreRules,
) -> Tensor:
    heads, groups, size = q_BHLK.shape[1], k_BGLK.shape[1], axis.size
    check_heads(heads, size)
    # Repeat key heads until the ranks can divide them; each stays with its query heads.
    repeats = math.lcm(groups, size) // groups
    kv = (x.repeat_interleave(repeats, 1) for x in (k_BGLK, v_BGLK))
    if rules.sinks is not None:
        rules = rules._replace(sinks=rules.sinks.unflatten(0, (size, -1))[axis.rank])
    heads_by_rank = [x.unflatten(1, (size, -1)) for x in (q_BHLK, *kv)]
    qkv = _AllToAll.apply(torch.cat(heads_by_rank, 2).transpose(0, 1).contiguous(), axis)
    q, k, v = _join_shares(qkv).split([x.shape[2] for x in heads_by_rank], 1)
    y_CBHLK = _AllToAll.apply(_split_shares(_on_one_rank(q, k, v, mask, rules), size), axis)
    y_BHLK: Tensor = y_CBHLK.transpose(0, 1).flatten(1, 2)
    return y_BHLK


def _join_shares(x_CBHLK: Tensor) -> Tensor:
    """Put the shares of all ranks in the order of tokens, (B, H, C × L, K)."""
    return in_order(x_CBHLK.movedim(0, 2).unflatten(3, (2, -1)), 2).flatten(2, 3)


def _split_shares(x_BHSK: Tensor, size: int) -> Tensor:
    """Split a sequence into the share of each rank, (C, B, H, S / C, K)."""
    chunks = by_rank(x_BHSK.unflatten(2, (2 * size, -1)), 2)
    return chunks.flatten(3, 4).movedim(2, 0).contiguous()


class _AllToAll(torch.autograd.Function):
    """Send row c of a (C, …) tensor to rank c and receive that rank's row in its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        received = torch.empty_like(x)
        axis.sends(x)
        dist.all_to_all_single(received, x, group=axis.group)
        axis.received(received)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient.contiguous(), ctx.axis), None


# ---- Documents of packed samples ----


@not_compiled
def by_document(
    q_BHLK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    documents: PackedDocuments,
    rules: ScoreRules = PLAIN_SCORES,
) -> Tensor:
    """Compute attention in which tokens attend only to their own document.

    Queries, keys and values have one floating-point dtype; H is a multiple of G.
    """
    at_once = _at_once(q_BHLK) and not rules.needs_scores
    batch, heads, length, _ = q_BHLK.shape
    # Lengths wait for the device: not where a mask is used anyhow.
    one_by_one = q_BHLK.device.type == "cpu" and (len(documents.lengths) * _SHORT <= batch * length)
    if not at_once and not one_by_one:
        if not rules.is_plain:
            return by_blocks(q_BHLK, k_BGLK, v_BGLK, documents.mask, rules)
        grouped = heads != k_BGLK.shape[1]
        return F.scaled_dot_product_attention(
            q_BHLK, k_BGLK, v_BGLK, attn_mask=documents.mask, enable_gqa=grouped
        )
    q_THK, k_TGK, v_TGK = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHLK, k_BGLK, v_BGLK))
    compute = _flash if at_once else _one_by_one
    y_THK = compute(q_THK, k_TGK, v_TGK, documents, rules)
    return y_THK.unflatten(0, (batch, length)).transpose(1, 2)


def _at_once(q_BHLK: Tensor) -> bool:
    """Whether flash attention supports these queries."""
    return (
        q_BHLK.dtype in (torch.float16, torch.bfloat16)
        and q_BHLK.shape[-1] % 8 == 0
        and q_BHLK.shape[-1] <= _WIDEST
        and device_type(q_BHLK.device).has_varlen(q_BHLK.device)
    )


def _flash(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: PackedDocuments, rules: ScoreRules
) -> Tensor:
    # Any number of earlier tokens, or the window's without the token itself; if causal, no later.
    earlier = -1 if rules.window is None else rules.window - 1
    window = earlier, 0 if documents.causal else -1
    longest = max(documents.lengths)
    return _varlen(q_THK, k_TGK, v_TGK, documents.bounds, longest=longest, window=window)


def _flash_rows(q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, rules: ScoreRules) -> Tensor:
    """Causal attention with a window; each row is a document."""
    assert rules.window is not None
    batch, _, length, _ = q_BHLK.shape
    q_THK, k_TGK, v_TGK = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHLK, k_BGLK, v_BGLK))
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q_BHLK.device)
    window = rules.window - 1, 0
    y_THK = _varlen(q_THK, k_TGK, v_TGK, ends, longest=length, window=window)
    return y_THK.unflatten(0, (batch, length)).transpose(1, 2)


def _varlen(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    bounds: Tensor,
    *,
    longest: int,
    window: tuple[int, int],
) -> Tensor:
    from torch.nn.attention import varlen  # not above: the import takes long

    options: dict[str, Any] = {"window_size": window}
    if "enable_gqa" in varlen_arguments():  # torch 2.11 takes grouped heads without being told
        options["enable_gqa"] = q_THK.shape[1] != k_TGK.shape[1]
    y_THK = varlen.varlen_attn(q_THK, k_TGK, v_TGK, bounds, bounds, longest, longest, **options)
    assert isinstance(y_THK, Tensor)
    return y_THK


def _one_by_one(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: PackedDocuments, rules: ScoreRules
) -> Tensor:
    heads_first = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    splits = (x.split(documents.lengths, 2) for x in heads_first)
    values = [
        _on_one_rank(q, k, v, None if documents.causal else UNMASKED, rules)
        for q, k, v in zip(*splits, strict=True)
    ]
    return torch.cat(values, 2)[0].transpose(0, 1)
