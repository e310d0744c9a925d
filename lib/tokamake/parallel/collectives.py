"""Differentiable collectives: the backward pass of each is another collective.

Inputs and outputs are local tensors of any dtype. On an axis of size 1, the differentiable ones
return their input. Forward and backward are paired as in Megatron-LM (arXiv 1909.08053
and 2205.05198).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake.parallel.axis import Axis

TensorFunction = Callable[[Tensor], Tensor]

# Newer versions of torch rename these functions and warn about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Return the tensor unchanged; all-reduce its gradient."""
    return x if axis.size == 1 else _Collective.apply(x, _identity, partial(all_reduce, axis=axis))


def add(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce (sum) the tensor over the ranks; pass its gradient on unchanged."""
    return x if axis.size == 1 else _Collective.apply(x, partial(all_reduce, axis=axis), _identity)


def gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """All-gather along `dim`, axis.size times as long afterwards; reduce-scatter the gradient."""
    if axis.size == 1:
        return x
    forward = partial(all_gather, axis=axis, dim=dim)
    return _Collective.apply(x, forward, partial(reduce_scatter, axis=axis, dim=dim))


def scatter_sum(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Reduce-scatter along `dim`, whose length axis.size divides; all-gather the gradient."""
    if axis.size == 1:
        return x
    forward = partial(reduce_scatter, axis=axis, dim=dim)
    return _Collective.apply(x, forward, partial(all_gather, axis=axis, dim=dim))


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks, in a new contiguous tensor, without a gradient."""
    total = x.clone(memory_format=torch.contiguous_format)
    axis.sends(total)
    dist.all_reduce(total, group=axis.group)
    axis.received(total)
    return total


def all_gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Concatenate the tensors of all ranks along `dim`, without a gradient."""
    first = x.movedim(dim, 0).contiguous()
    whole = first.new_empty(axis.size * first.shape[0], *first.shape[1:])
    axis.sends(first)
    _all_gather(whole, first, group=axis.group)
    axis.received(whole)
    return whole.movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Sum over the ranks and keep this rank's part along `dim`, without a gradient."""
    whole = x.movedim(dim, 0).contiguous()
    part = whole.new_empty(whole.shape[0] // axis.size, *whole.shape[1:])
    axis.sends(whole)
    _reduce_scatter(part, whole, group=axis.group)
    axis.received(part)
    # Pipeline stages send contiguous tensors only.
    return part.movedim(0, dim).contiguous()


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)


class _Collective(torch.autograd.Function):
    """Apply a function to a tensor in forward, and another function to its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: TensorFunction, backward: TensorFunction) -> Tensor:
        ctx.of_gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of_gradient(gradient), None, None
