"""Logits of which tensor-parallel ranks each have a part of the vocabulary: cross entropy, draws.

Shape suffixes: N tokens, V vocabulary of this rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tokamake.parallel.axis import Axis, part
from tokamake.parallel.collectives import all_gather, all_reduce
from tokamake.parallel.mesh import ALONE, Mesh

NO_LABEL = -100
"""In the place of a label: a token without a loss."""

_ROOM, _ROOM_ON_CPU = 2**28, 2**22
"""Bytes of fp32 scores that are made at once: many, or what caches hold."""


def cross_entropy(logits: Tensor, labels: Tensor, mesh: Mesh = ALONE, *, size: int) -> Tensor:
    """Sum of the cross entropy of all tokens, in nats, fp32.

    Its backward pass writes the gradient over the logits.

    Args:
        logits: (..., V), scores of this rank's part of the vocabulary.
        labels: (...), int64, tokens of the whole vocabulary, or `NO_LABEL`.
        mesh: this rank among its peers.
        size: entries of the whole vocabulary.
    """
    logits_NV, labels_N = logits.flatten(0, -2), labels.flatten()
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
    logits_NV, chances_N = logits.flatten(0, -2), chances.flatten()
    # Only the last parts are smaller, so that what fills them up lies after the vocabulary.
    missing = len(part(size, Axis(0, mesh.tensor.size))) - logits_NV.shape[1]
    drawn_N = torch.empty_like(chances_N, dtype=torch.int64)
    for some in _chunks(logits_NV, size):
        scores = logits_NV[some]
        if mesh.tensor.size > 1:
            scores = F.pad(scores, (0, missing), value=-torch.inf)
            scores = all_gather(scores, mesh.tensor, dim=-1)[:, :size]
        before = scores.float().softmax(-1).cumsum(-1)
        place = chances_N[some, None] * before[:, -1:]
        found = torch.searchsorted(before, place, right=True)[:, 0]
        drawn_N[some] = found.clamp(max=size - 1)
    return drawn_N.view(chances.shape)


class _CrossEntropy(torch.autograd.Function):
    """Needs no room but for the logits: the fp32 softmax is made of some tokens at a time, twice.

    torch's own keeps it, and its gradient, and that of the loss, all as large as fp32 logits: at a
    vocabulary of 128,000 that is more than what all layers keep.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, axis: Axis, rows: range) -> Tensor:
        """Sum of the losses; kept are the logits and what normalizes them."""
        own_N = (labels_N >= rows.start) & (labels_N < rows.stop)
        index_N = (labels_N - rows.start).masked_fill(~own_N, 0)
        lse_N = torch.full(labels_N.shape, -torch.inf, device=logits_NV.device)
        at_label_N = torch.zeros_like(lse_N)
        if rows:
            for some in _chunks(logits_NV, logits_NV.shape[1]):
                torch.logsumexp(logits_NV[some].float(), -1, out=lse_N[some])
            at_label_N = logits_NV.gather(-1, index_N[:, None])[:, 0].float().masked_fill(~own_N, 0)
        if axis.size > 1:
            lse_N, at_label_N = _over_ranks(lse_N, at_label_N, axis)
        ctx.save_for_backward(logits_NV, lse_N, index_N, own_N, labels_N)
        return (lse_N - at_label_N).masked_fill(labels_N == NO_LABEL, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Softmax less one at the label, times the gradient of the sum; in place of the logits.

        torch raises if anything that is yet to be differentiated needs the logits as they were.
        """
        logits_NV, lse_N, index_N, own_N, labels_N = ctx.saved_tensors
        factor_N = grad * (labels_N != NO_LABEL)
        less_N = own_N.float().neg_()
        width = logits_NV.shape[1]
        for some in _chunks(logits_NV, width) if width else ():
            logits = logits_NV[some]
            scores = logits if logits.dtype == torch.float32 else logits.float()
            scores.sub_(lse_N[some, None]).exp_()
            scores.scatter_add_(-1, index_N[some, None], less_N[some, None])
            scores.mul_(factor_N[some, None])
            if scores is not logits:
                logits.copy_(scores)
        return logits_NV, None, None, None


def _chunks(logits_NV: Tensor, width: int) -> Iterator[slice]:
    """Tokens whose fp32 scores, so many each, are few enough."""
    room = _ROOM_ON_CPU if logits_NV.device.type == "cpu" else _ROOM
    tokens = max(1, room // (4 * width))
    for start in range(0, len(logits_NV), tokens):
        yield slice(start, start + tokens)


def _over_ranks(lse_N: Tensor, at_label_N: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and logit of the label over the whole vocabulary."""
    most_N = lse_N.clone()
    dist.all_reduce(most_N, dist.ReduceOp.MAX, group=axis.group)
    sums_2N = all_reduce(torch.stack(((lse_N - most_N).exp(), at_label_N)), axis)
    return sums_2N[0].log() + most_N, sums_2N[1]
