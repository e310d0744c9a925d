"""Cross entropy and sampling of logits whose vocabulary is divided among tensor-parallel ranks.

Shape suffixes: N tokens, V vocabulary of this rank.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tokamake.parallel.axis import Axis, part
from tokamake.parallel.collectives import all_gather, all_reduce
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.runtime.device_types import device_type

NO_LABEL = -100
"""Label of a token that has no loss; the default of torch."""

_ROOM, _ROOM_ON_CPU = 2**28, 2**22
"""Bytes of fp32 scores computed at once; on a CPU, as many as its caches hold."""


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    mesh: Mesh = SINGLE_RANK,
    size: int,
    compiled: bool = False,
    row_losses: list[Tensor] | None = None,
) -> Tensor:
    """Sum of the cross entropy of all tokens, in nats, fp32.

    The backward pass overwrites the logits with their gradient.

    Args:
        logits: (..., V) floating-point scores of this rank's part of the vocabulary.
        labels: (...) int64 token ids of the whole vocabulary, or `NO_LABEL`.
        compiled: whether to compile the arithmetic with torch.compile, unless it is on a CPU. It
            then reads the logits once in each direction, and holds no other scores.
        row_losses: list that gets the sum of each row of labels, (...) without the last dimension,
            fp32, without a gradient; None: they are not computed.
    """
    logits_NV, labels_N = logits.flatten(0, -2), labels.flatten()
    own = part(size, mesh.tensor)

    def keep(losses_N: Tensor) -> None:
        if row_losses is not None:
            row_losses.append(losses_N.view(labels.shape).sum(-1))

    return _CrossEntropy.apply(
        logits_NV, labels_N, mesh.tensor, own, _is_compiled(logits, compiled), keep
    )


@torch.no_grad()
def token_losses(logits: Tensor, labels: Tensor, *, mesh: Mesh = SINGLE_RANK, size: int) -> Tensor:
    """Cross entropy of each token in nats, (...) fp32, without a gradient.

    Arguments as in `cross_entropy`; each label is a token id.
    """
    own_N, index_N = _columns(labels.flatten(), part(size, mesh.tensor))
    logits_NV = logits.flatten(0, -2)
    lse_N, at_label_N = _scores(logits_NV, own_N, index_N, axis=mesh.tensor, compiled=False)
    return (lse_N - at_label_N).view(labels.shape)


@torch.no_grad()
def num_right(logits: Tensor, labels: Tensor, *, mesh: Mesh = SINGLE_RANK, size: int) -> Tensor:
    """Number of labels whose logit is the highest one of their token, fp32.

    Arguments as in `cross_entropy`; tokens without a label do not count.
    """
    labels_N, logits_NV = labels.flatten(), logits.flatten(0, -2)
    own_N, index_N = _columns(labels_N, part(size, mesh.tensor))
    at_label_N = torch.full(index_N.shape, -torch.inf, device=logits.device)
    highest_N = at_label_N.clone()
    if logits_NV.shape[1]:
        at_label_N = logits_NV.gather(-1, index_N[:, None])[:, 0].float()
        at_label_N = at_label_N.masked_fill(~own_N, -torch.inf)
        highest_N = logits_NV.amax(-1).float()
    both_2N = torch.stack((at_label_N, highest_N))
    if mesh.tensor.size > 1:
        dist.all_reduce(both_2N, dist.ReduceOp.MAX, group=mesh.tensor.group)
    return ((both_2N[0] >= both_2N[1]) & (labels_N != NO_LABEL)).sum().float()


@torch.no_grad()
def drawn(logits: Tensor, chances: Tensor, mesh: Mesh = SINGLE_RANK, *, size: int) -> Tensor:
    """Sample tokens from the model's predictions, the same on all tensor-parallel ranks.

    Args:
        logits: (..., V) floating-point scores of this rank's part of the vocabulary.
        chances: (...) fp32 random numbers, uniform in [0, 1). A token is drawn if its number is in
            the token's interval of the cumulative distribution.

    Returns:
        (...) int64 token ids.
    """
    logits_NV, chances_N = logits.flatten(0, -2), chances.flatten()
    drawn_N = torch.empty_like(chances_N, dtype=torch.int64)
    for rows in _chunks(logits_NV, size):
        scores = over_vocabulary(logits_NV[rows], mesh.tensor, size=size)
        cumulative = scores.float().softmax(-1).cumsum(-1)
        # The sum of all probabilities may differ from 1 by rounding.
        targets = chances_N[rows, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0]
        drawn_N[rows] = tokens.clamp(max=size - 1)
    return drawn_N.view(chances.shape)


def over_vocabulary(logits_NV: Tensor, axis: Axis, *, size: int) -> Tensor:
    """Gather the logits (N, `size`) of the whole vocabulary from the parts of the ranks."""
    if axis.size == 1:
        return logits_NV
    # Parts are padded to equal length. Only the last ones are shorter, so all padding comes after
    # the vocabulary.
    missing = len(part(size, Axis(0, axis.size))) - logits_NV.shape[1]
    padded = F.pad(logits_NV, (0, missing), value=-torch.inf)
    return all_gather(padded, axis, dim=-1)[:, :size]


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy that keeps only the logits and computes the softmax in chunks, twice.

    torch's own keeps the fp32 softmax, its gradient and the loss's gradient, each of the size of
    fp32 logits. With a vocabulary of 128,000, that is more than the activations of all layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        labels_N: Tensor,
        axis: Axis,
        own: range,
        compiled: bool,
        keep: Callable[[Tensor], None],
    ) -> Tensor:
        """Return the sum of the losses; `own` is this rank's part of the vocabulary."""
        own_N, index_N = _columns(labels_N, own)
        lse_N, at_label_N = _scores(logits_NV, own_N, index_N, axis=axis, compiled=compiled)
        ctx.compiled = compiled
        ctx.save_for_backward(logits_NV, lse_N, index_N, own_N, labels_N)
        losses_N = (lse_N - at_label_N).masked_fill(labels_N == NO_LABEL, 0)
        keep(losses_N)
        return losses_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Overwrite the logits with (softmax - one-hot label) times the gradient of the sum.

        torch raises an error if another backward pass still needs the original logits.
        """
        logits_NV, lse_N, index_N, own_N, labels_N = ctx.saved_tensors
        factor_N = grad * (labels_N != NO_LABEL)
        minus_one_N = own_N.float().neg_()
        width = logits_NV.shape[1]
        if ctx.compiled and width:
            _compiled(_to_gradient)(logits_NV, lse_N, index_N, minus_one_N, factor_N)
            return logits_NV, None, None, None, None, None
        for rows in _chunks(logits_NV, width) if width else ():
            logits = logits_NV[rows]
            scores = logits if logits.dtype == torch.float32 else logits.float()
            scores.sub_(lse_N[rows, None]).exp_()
            scores.scatter_add_(-1, index_N[rows, None], minus_one_N[rows, None])
            scores.mul_(factor_N[rows, None])
            if scores is not logits:
                logits.copy_(scores)
        return logits_NV, None, None, None, None, None


def _columns(labels_N: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """Whether each label is in this rank's part of the vocabulary, and its column there, or 0."""
    own_N = (labels_N >= own.start) & (labels_N < own.stop)
    return own_N, (labels_N - own.start).masked_fill(~own_N, 0)


def _scores(
    logits_NV: Tensor, own_N: Tensor, index_N: Tensor, *, axis: Axis, compiled: bool
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the whole vocabulary, and the logit of each label, fp32."""
    lse_N = torch.full(index_N.shape, -torch.inf, device=logits_NV.device)
    at_label_N = torch.zeros_like(lse_N)
    if logits_NV.shape[1]:
        if compiled:
            lse_N = _compiled(_log_sum_exp)(logits_NV)
        else:
            for rows in _chunks(logits_NV, logits_NV.shape[1]):
                torch.logsumexp(logits_NV[rows].float(), -1, out=lse_N[rows])
        at_label_N = logits_NV.gather(-1, index_N[:, None])[:, 0].float().masked_fill(~own_N, 0)
    return _over_ranks(lse_N, at_label_N, axis) if axis.size > 1 else (lse_N, at_label_N)


def _log_sum_exp(logits_NV: Tensor) -> Tensor:
    return torch.logsumexp(logits_NV.float(), -1)


def _to_gradient(
    logits_NV: Tensor, lse_N: Tensor, index_N: Tensor, minus_one_N: Tensor, factor_N: Tensor
) -> None:
    """Overwrite logits with their gradient.

    A comparison replaces scatter, which would read the logits twice.

    Args:
        lse_N: log-sum-exp over the whole vocabulary.
        index_N: column of the label.
        minus_one_N: -1 if the label is in this part of the vocabulary, else 0.
        factor_N: gradient of each token's loss.
    """
    columns_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    at_label_NV = torch.where(columns_V == index_N[:, None], minus_one_N[:, None], 0.0)
    softmax_NV = (logits_NV.float() - lse_N[:, None]).exp()
    logits_NV.copy_((softmax_NV + at_label_NV) * factor_N[:, None])


def _is_compiled(logits: Tensor, wanted: bool) -> bool:
    """Whether to compile: on a CPU, chunks stay in its caches and are fast as they are."""
    return wanted and device_type(logits.device).compiles


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled


def _chunks(logits_NV: Tensor, width: int) -> Iterator[slice]:
    """Yield slices of tokens whose fp32 scores, `width` per token, fit into the room."""
    room = _ROOM_ON_CPU if logits_NV.device.type == "cpu" else _ROOM
    tokens = max(1, room // (4 * width))
    for start in range(0, len(logits_NV), tokens):
        yield slice(start, start + tokens)


def _over_ranks(lse_N: Tensor, at_label_N: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Combine log-sum-exp and the label's logit over the parts of the vocabulary."""
    max_N = lse_N.clone()
    axis.sends(max_N)
    dist.all_reduce(max_N, dist.ReduceOp.MAX, group=axis.group)
    axis.received(max_N)
    sums_2N = all_reduce(torch.stack(((lse_N - max_N).exp(), at_label_N)), axis)
    return sums_2N[0].log() + max_N, sums_2N[1]
