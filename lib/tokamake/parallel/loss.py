"""Logits of which tensor-parallel ranks each have a part of the vocabulary: cross entropy, draws.

Shape suffixes: N tokens, V vocabulary of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tokamake.parallel.collectives import all_gather, all_reduce
from tokamake.parallel.mesh import ALONE, Axis, Mesh
from tokamake.parallel.tensor import part

NO_LABEL = -100
"""In the place of a label: a token without a loss."""


def cross_entropy(logits: Tensor, labels: Tensor, mesh: Mesh = ALONE, *, size: int) -> Tensor:
    """Sum of the cross entropy of all tokens, in nats, fp32.

    Args:
        logits: (..., V), scores of this rank's part of the vocabulary.
        labels: (...), int64, tokens of the whole vocabulary, or `NO_LABEL`.
        mesh: this rank among its peers.
        size: entries of the whole vocabulary.
    """
    logits_NV, labels_N = logits.flatten(0, -2), labels.flatten()
    if mesh.tensor.size == 1:
        return F.cross_entropy(logits_NV.float(), labels_N, ignore_index=NO_LABEL, reduction="sum")
    return _CrossEntropy.apply(logits_NV, labels_N, mesh.tensor, part(size, mesh.tensor))


@torch.no_grad()
def drawn(logits: Tensor, chances: Tensor, mesh: Mesh = ALONE, *, size: int) -> Tensor:
    """Tokens drawn from the model's predictions, the same on all tensor-parallel ranks.

    Args:
        logits: (..., V), scores of this rank's part of the vocabulary.
        chances: (...), fp32, uniform in [0, 1): the share of all odds that lies before the token.
        mesh: this rank among its peers.
        size: entries of the whole vocabulary.

    Returns:
        (...) int64.
    """
    if mesh.tensor.size > 1:
        # Only the last parts are smaller, so that what fills them up lies after the vocabulary.
        missing = len(part(size, Axis(0, mesh.tensor.size))) - logits.shape[-1]
        logits = F.pad(logits, (0, missing), value=-torch.inf)
        logits = all_gather(logits, mesh.tensor, dim=-1)[..., :size]
    before = logits.float().softmax(-1).cumsum(-1)
    place = chances[..., None] * before[..., -1:]
    return torch.searchsorted(before, place, right=True)[..., 0].clamp(max=size - 1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, axis: Axis, rows: range) -> Tensor:
        """Sum of the losses; each rank keeps its part of the softmax."""
        scores_NV = logits_NV.float()
        lowest = torch.finfo(torch.float32).min
        most_N = scores_NV.amax(-1) if rows else scores_NV.new_full(labels_N.shape, lowest)
        dist.all_reduce(most_N, dist.ReduceOp.MAX, group=axis.group)
        scores_NV = scores_NV - most_N[:, None]
        own_N = (labels_N >= rows.start) & (labels_N < rows.stop)
        index_N = (labels_N - rows.start).masked_fill(~own_N, 0)
        at_label_N = scores_NV.new_zeros(labels_N.shape)
        if rows:
            at_label_N = scores_NV.gather(-1, index_N[:, None])[:, 0].masked_fill(~own_N, 0)
        odds_NV = scores_NV.exp_()
        sums_2N = all_reduce(torch.stack((odds_NV.sum(-1), at_label_N)), axis)
        ctx.save_for_backward(odds_NV.div_(sums_2N[0][:, None]), index_N, own_N, labels_N)
        ctx.dtype = logits_NV.dtype
        losses_N = sums_2N[0].log() - sums_2N[1]
        return losses_N.masked_fill(labels_N == NO_LABEL, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Softmax less one at the label, times the gradient of the sum."""
        shares_NV, index_N, own_N, labels_N = ctx.saved_tensors
        # In place, to save memory: torch raises if the same pass is gone back twice.
        gradient_NV = shares_NV
        if gradient_NV.shape[1]:
            gradient_NV.scatter_add_(-1, index_N[:, None], -own_N[:, None].float())
        gradient_NV *= grad * (labels_N != NO_LABEL)[:, None]
        return gradient_NV.to(ctx.dtype), None, None, None
