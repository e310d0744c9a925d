"""Attention of a block of queries to a block of keys, with the log-sum-exp of the scores.

The log-sum-exp lets `ring` merge and differentiate blocks as parts of one softmax. Each device has
its fused kernels; plain fp32 arithmetic is the fallback. The backward of one kernel may follow the
forward of another.
Shape suffixes: B batch, L queries, S keys, H query heads, G key and value heads, R query heads of
a key head, K width of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tokamake.runtime.device_types import device_type
from tokamake.runtime.torch_internals import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
)

_ROWS = 512
"""Queries per step of the plain kernel, which bounds the memory of scores."""

_LSE_ALIGNMENT = 32
"""CUDA's memory-efficient kernel pads rows of log-sum-exp to a multiple of this length."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values, each of the shape of its tensor."""


@dataclass(frozen=True)
class AttentionBlock:
    """Queries, keys and values of one floating-point dtype, and their mask."""

    q_BHLK: Tensor
    k_BGSK: Tensor
    v_BGSK: Tensor
    causal: bool = False
    """Query i attends to keys 0 … i only; then S equals L."""
    bias: Tensor | None = None
    """(B or 1, 1, L, S), added to the scores, in the dtype of the queries; finite."""
    softcap: float = 0.0
    """c: scores become c · tanh(score / c) before the bias; 0: they stay."""

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return 1.0 / math.sqrt(self.q_BHLK.shape[-1])

    @property
    def repeats(self) -> int:
        """Query heads per key head."""
        return self.q_BHLK.shape[1] // self.k_BGSK.shape[1]


class Kernel(Protocol):
    """An implementation of attention."""

    @staticmethod
    def serves(block: AttentionBlock) -> bool:
        """Whether this kernel supports the block."""

    @staticmethod
    def forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """Return (B, H, L, K) values in the kernel's dtype and (B, H, L) log-sum-exp of scores."""

    @staticmethod
    def backward(
        block: AttentionBlock, dy_BHLK: Tensor, y_BHLK: Tensor, lse_BHL: Tensor
    ) -> Gradients:
        """Return the gradients of queries, keys and values.

        Values, their gradient and log-sum-exp are merged over all blocks.
        """


def kernel(block: AttentionBlock) -> type[Kernel]:
    """The fastest kernel that supports the block."""
    if block.softcap:
        return Plain
    return next(each for each in (ForCPU, Flash, MemoryEfficient, Plain) if each.serves(block))


class ForCPU:
    """torch's flash attention for CPUs."""

    @staticmethod
    def serves(block: AttentionBlock) -> bool:
        return block.q_BHLK.device.type == "cpu"

    @staticmethod
    def forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
        tensors = (block.q_BHLK, block.k_BGSK, block.v_BGSK)
        y_BHLK, lse_BHL = cpu_flash_attention(*tensors, 0.0, block.causal, attn_mask=block.bias)
        return y_BHLK, lse_BHL

    @staticmethod
    def backward(
        block: AttentionBlock, dy_BHLK: Tensor, y_BHLK: Tensor, lse_BHL: Tensor
    ) -> Gradients:
        tensors = (block.q_BHLK, block.k_BGSK, block.v_BGSK, y_BHLK, lse_BHL)
        gradients: Gradients = cpu_flash_attention_backward(
            dy_BHLK, *tensors, 0.0, block.causal, attn_mask=block.bias
        )
        return gradients


def _allowed(block: AttentionBlock, name: str, *, grouped: bool) -> bool:
    """Whether torch's own check allows a fused kernel for the block."""
    tensors = (block.q_BHLK, block.k_BGSK, block.v_BGSK)
    allows = device_type(block.q_BHLK.device).allows_attention
    return allows(name, tensors, causal=block.causal, grouped=grouped)


class Flash:
    """CUDA's flash attention: 16-bit dtypes, no bias."""

    @staticmethod
    def serves(block: AttentionBlock) -> bool:
        if block.bias is not None or block.q_BHLK.shape[-1] % 8:
            return False
        return _allowed(block, "can_use_flash_attention", grouped=block.repeats > 1)

    @staticmethod
    def forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
        y_BHLK, lse_BHL, *_ = flash_attention(
            block.q_BHLK, block.k_BGSK, block.v_BGSK, 0.0, block.causal, scale=block.scale
        )
        return y_BHLK, lse_BHL

    @staticmethod
    def backward(
        block: AttentionBlock, dy_BHLK: Tensor, y_BHLK: Tensor, lse_BHL: Tensor
    ) -> Gradients:
        """See `Kernel`."""
        tensors = (block.q_BHLK, block.k_BGSK, block.v_BGSK, y_BHLK, lse_BHL.contiguous())
        lengths = (None, None, block.q_BHLK.shape[2], block.k_BGSK.shape[2])
        # The state of a random generator, unused without dropout.
        state = (
            lse_BHL.new_zeros(2, dtype=torch.uint64),
            lse_BHL.new_zeros((), dtype=torch.uint64),
        )
        gradients: Gradients = flash_attention_backward(
            dy_BHLK, *tensors, *lengths, 0.0, block.causal, *state, scale=block.scale
        )
        return gradients


class MemoryEfficient:
    """CUDA's memory-efficient attention: any dtype up to fp32, with or without bias."""

    @staticmethod
    def serves(block: AttentionBlock) -> bool:
        lengths = block.q_BHLK.shape[2], block.k_BGSK.shape[2]
        if any(length % _LSE_ALIGNMENT for length in lengths) or block.q_BHLK.shape[-1] % 8:
            return False
        return _allowed(_ungrouped(block), "can_use_efficient_attention", grouped=False)

    @staticmethod
    def forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
        whole = _ungrouped(block)
        y_BHLK, lse_BHL, *_ = efficient_attention(
            whole.q_BHLK, whole.k_BGSK, whole.v_BGSK, whole.bias, True, 0.0, whole.causal
        )
        return y_BHLK, lse_BHL

    @staticmethod
    def backward(
        block: AttentionBlock, dy_BHLK: Tensor, y_BHLK: Tensor, lse_BHL: Tensor
    ) -> Gradients:
        """See `Kernel`."""
        whole = _ungrouped(block)
        tensors = (whole.q_BHLK, whole.k_BGSK, whole.v_BGSK, whole.bias, y_BHLK)
        # The state of a random generator, unused without dropout.
        state = [lse_BHL.new_zeros((), dtype=torch.int64) for _ in range(2)]
        dq_BHLK, *dkv_BHSK, _ = efficient_attention_backward(
            *(dy_BHLK, *tensors, lse_BHL.contiguous(), *state),
            *(0.0, [True, True, True, False], whole.causal),
        )
        dk_BGSK, dv_BGSK = (_grouped(gradient, block) for gradient in dkv_BHSK)
        return dq_BHLK, dk_BGSK, dv_BGSK


def _ungrouped(block: AttentionBlock) -> AttentionBlock:
    """The same block with a key head, a value head and a bias for each query head."""
    k_BHSK = block.k_BGSK.repeat_interleave(block.repeats, 1)
    v_BHSK = block.v_BGSK.repeat_interleave(block.repeats, 1)
    bias = None
    if block.bias is not None:
        bias = block.bias.expand(-1, block.q_BHLK.shape[1], -1, -1)
    return AttentionBlock(block.q_BHLK, k_BHSK, v_BHSK, block.causal, bias)


def _grouped(gradient_BHSK: Tensor, block: AttentionBlock) -> Tensor:
    """Sum the gradients of the copies of each key or value head, (B, G, S, K)."""
    gradient = gradient_BHSK.unflatten(1, (-1, block.repeats))
    return gradient.sum(2, dtype=_wide(gradient.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums: fp32, or `dtype` if it is wider."""
    return torch.promote_types(dtype, torch.float32)


class Plain:
    """Plain arithmetic in fp32 or wider, on any device; it holds scores of `_ROWS` queries."""

    @staticmethod
    def serves(block: AttentionBlock) -> bool:
        return block.q_BHLK.is_floating_point()

    @staticmethod
    def forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        v_BGSK = block.v_BGSK.to(_wide(block.v_BGSK.dtype))[:, :, None]
        values, sums = [], []
        for _, scores_BGRLS, _ in _scores(block):
            lse_BGRL = scores_BGRLS.logsumexp(-1)
            weights = (scores_BGRLS - lse_BGRL[..., None]).exp_()
            values.append((weights @ v_BGSK[..., : weights.shape[-1], :]).flatten(1, 2))
            sums.append(lse_BGRL.flatten(1, 2))
        return torch.cat(values, 2), torch.cat(sums, 2)

    @staticmethod
    def backward(
        block: AttentionBlock, dy_BHLK: Tensor, y_BHLK: Tensor, lse_BHL: Tensor
    ) -> Gradients:
        """See `Kernel`."""
        wide = _wide(block.q_BHLK.dtype)
        groups = (block.k_BGSK.shape[1], -1)
        q, dy, y = (x.to(wide).unflatten(1, groups) for x in (block.q_BHLK, dy_BHLK, y_BHLK))
        lse = lse_BHL.unflatten(1, groups)[..., None]
        # The sum over all keys of weight times its gradient (FlashAttention, arXiv 2205.14135), so
        # a block of keys needs no other block.
        delta = (dy * y).sum(-1, keepdim=True)
        k, v = (x.to(wide)[:, :, None] for x in (block.k_BGSK, block.v_BGSK))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k[:, :, 0]), torch.zeros_like(v[:, :, 0])
        for rows, scores, slopes in _scores(block):
            keys = slice(scores.shape[-1])
            weights = scores.sub_(lse[..., rows, :]).exp_()
            dv[:, :, keys] += (weights.mT @ dy[..., rows, :]).sum(2)
            dweights = dy[..., rows, :] @ v[..., keys, :].mT
            dscores = dweights.sub_(delta[..., rows, :]).mul_(weights).mul_(block.scale)
            if slopes is not None:
                dscores.mul_(slopes)
            dq[..., rows, :] = dscores @ k[..., keys, :]
            dk[:, :, keys] += (dscores.mT @ q[..., rows, :]).sum(2)
        return dq.flatten(1, 2), dk, dv


def _scores(block: AttentionBlock) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield rows of queries and their (B, G, R, rows, S) scores, up to their last visible key.

    Capped scores come with their slopes, the derivatives of the cap.
    Nothing is computed in place, because recomputation may keep a product.
    """
    wide = _wide(block.q_BHLK.dtype)
    q = block.q_BHLK.to(wide).unflatten(1, (block.k_BGSK.shape[1], -1)) * block.scale
    k = block.k_BGSK.to(wide)[:, :, None]
    for start in range(0, q.shape[3], _ROWS):
        rows = slice(start, min(start + _ROWS, q.shape[3]))
        keys = slice(rows.stop if block.causal else k.shape[3])
        scores, slopes = q[..., rows, :] @ k[..., keys, :].mT, None
        if block.softcap:
            shares = torch.tanh(scores / block.softcap)
            scores, slopes = shares * block.softcap, 1 - shares.square()
        if block.bias is not None:
            scores = scores + block.bias[:, :, None, rows, keys]
        if block.causal:
            visible = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(start)
            scores = scores.masked_fill(~visible, -torch.inf)
        yield rows, scores, slopes
