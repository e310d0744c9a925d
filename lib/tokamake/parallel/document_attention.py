"""Attention within the documents of a packed sample.

On CUDA, flash attention takes all documents in one call. A CPU computes one document after the
other, which is faster than to mask the scores of other documents. In all other cases, a mask is
used. Shape suffixes: B batch, L tokens, T tokens of the batch, H query heads, G key and value
heads, K width of a head.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tokamake.parallel.context import PackedDocuments
from tokamake.runtime.torch_internals import not_compiled

_SHORT = 32
"""Mean length in tokens below which a call for each document costs more than a mask."""

_WIDEST = 256
"""Largest width of a head that flash attention supports."""


@not_compiled
def by_document(
    q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, documents: PackedDocuments
) -> Tensor:
    """Compute attention in which tokens attend only to their own document.

    Args:
        q_BHLK: (B, H, L, K) floating-point queries.
        k_BGLK: (B, G, L, K) keys, same dtype; H is a multiple of G.
        v_BGLK: (B, G, L, K) values, same dtype.
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
    """Whether flash attention supports these queries."""
    return (
        q_BHLK.device.type == "cuda"
        and q_BHLK.dtype in (torch.float16, torch.bfloat16)
        and q_BHLK.shape[-1] % 8 == 0
        and q_BHLK.shape[-1] <= _WIDEST
        and _has_flash(q_BHLK.device)
    )


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether a GPU supports flash attention: NVIDIA from Ampere on. AMD is not tested."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    # torch 2.9 has the function with other arguments.
    return "window_size" in _arguments()


@cache
def _arguments() -> frozenset[str]:
    from torch.nn.attention import varlen

    return frozenset(inspect.signature(varlen.varlen_attn).parameters)


def _flash(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: PackedDocuments) -> Tensor:
    from torch.nn.attention import varlen  # not above: the import takes long

    longest = max(documents.lengths)
    # Any number of earlier tokens; if causal, no later ones.
    options: dict[str, Any] = {"window_size": (-1, 0 if documents.causal else -1)}
    if "enable_gqa" in _arguments():  # torch 2.11 takes grouped heads without being told
        options["enable_gqa"] = q_THK.shape[1] != k_TGK.shape[1]
    bounds = documents.bounds
    y_THK = varlen.varlen_attn(q_THK, k_TGK, v_TGK, bounds, bounds, longest, longest, **options)
    assert isinstance(y_THK, Tensor)
    return y_THK


def _one_by_one(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, documents: PackedDocuments) -> Tensor:
    grouped = q_THK.shape[1] != k_TGK.shape[1]
    heads_first = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    splits = (x.split(documents.lengths, 2) for x in heads_first)
    values = [
        F.scaled_dot_product_attention(q, k, v, is_causal=documents.causal, enable_gqa=grouped)
        for q, k, v in zip(*splits, strict=True)
    ]
    return torch.cat(values, 2)[0].transpose(0, 1)
