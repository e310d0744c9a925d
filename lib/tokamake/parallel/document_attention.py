"""Attention of samples that several documents share, each kept to itself.

CUDA's flash attention takes all documents in one call; a CPU takes them one by one, which costs
less than to mask scores of tokens that do not see each other. Where neither fits, a mask it is.
Shape suffixes: B batch, L tokens, T tokens of the batch, H query heads, G key and value heads,
K width of a head.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen

from tokamake.parallel.context import PackedDocuments

_SHORT = 32
"""Tokens of a document on average, below which calls for each would cost more than a mask."""

VARLEN: Any = getattr(torch.ops.torch_attn, "_varlen_attn", None)
"""The operator that `varlen_attn` calls, if torch has it."""

_WIDEST = 256
"""Most numbers of a head that flash attention takes."""


@torch.compiler.disable
def by_document(
    q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, documents: PackedDocuments
) -> Tensor:
    """Causal attention in which tokens see those of their own document alone.

    Args:
        q_BHLK: (B, H, L, K) queries.
        k_BGLK: (B, G, L, K) keys; H is a multiple of G.
        v_BGLK: (B, G, L, K) values.
        documents: of all tokens.

    Returns:
        (B, H, L, K).
    """
    at_once = _at_once(q_BHLK)
    batch, heads, length, _ = q_BHLK.shape
    few = len(documents.lengths) * _SHORT <= batch * length
    if not at_once and not (few and q_BHLK.device.type == "cpu"):
        grouped = heads != k_BGLK.shape[1]
        return F.scaled_dot_product_attention(
            q_BHLK, k_BGLK, v_BGLK, attn_mask=documents.mask, enable_gqa=grouped
        )
    q_THK, k_TGK, v_TGK = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHLK, k_BGLK, v_BGLK))
    compute = _flash if at_once else _one_by_one
    y_THK = compute(q_THK, k_TGK, v_TGK, documents)
    return y_THK.unflatten(0, (batch, length)).transpose(1, 2)


def _at_once(q_BHLK: Tensor) -> bool:
    """Whether flash attention takes such tensors."""
    return (
        q_BHLK.device.type == "cuda"
        and q_BHLK.dtype in (torch.float16, torch.bfloat16)
        and q_BHLK.shape[-1] % 8 == 0
        and q_BHLK.shape[-1] <= _WIDEST
        and _has_flash(q_BHLK.device)
    )


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether a GPU has flash attention: NVIDIA's from Ampere on; on others it is untried."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    # There is the function since torch 2.9, yet at first without grouped heads.
    return "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def _flash(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: PackedDocuments) -> Tensor:
    longest = max(documents.lengths)
    y_THK = varlen.varlen_attn(
        q_THK,
        k_TGK,
        v_TGK,
        documents.bounds,
        documents.bounds,
        longest,
        longest,
        # Any number of tokens before, none after.
        window_size=(-1, 0),
        enable_gqa=q_THK.shape[1] != k_TGK.shape[1],
    )
    assert isinstance(y_THK, Tensor)
    return y_THK


def _one_by_one(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: PackedDocuments) -> Tensor:
    grouped = q_THK.shape[1] != k_TGK.shape[1]
    heads_first = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    each = (x.split(documents.lengths, 2) for x in heads_first)
    found = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        for q, k, v in zip(*each, strict=True)
    ]
    return torch.cat(found, 2)[0].transpose(0, 1)
