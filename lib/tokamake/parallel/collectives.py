"""Collectives that gradients flow back through: each is another one in the backward pass.

Inputs and outputs are plain tensors of this rank; along an axis of size 1 all do nothing. Which
pairs belong together, forward and backward: Megatron-LM, arXiv 1909.08053 and 2205.05198.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake.parallel.axis import Axis

# Newer versions of torch call them otherwise, and complain about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def copy(x: Tensor, axis: Axis) -> Tensor:
    """The same tensor, whose gradients are summed over the ranks that use it."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def add(x: Tensor, axis: Axis) -> Tensor:
    """Sum over ranks; its gradient is that of each part."""
    return x if axis.size == 1 else _Add.apply(x, axis)


def gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Parts of all ranks, concatenated; gradients are summed, and each rank gets its part's."""
    return x if axis.size == 1 else _Gather.apply(x, axis, dim)


def scatter_sum(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """This rank's part of the sum over ranks; gradients of the parts are gathered."""
    return x if axis.size == 1 else _ScatterSum.apply(x, axis, dim)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over ranks, in a new tensor, without a gradient."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def all_gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Parts of all ranks, concatenated, without a gradient."""
    first = x.movedim(dim, 0).contiguous()
    whole = first.new_empty(axis.size * first.shape[0], *first.shape[1:])
    _all_gather(whole, first, group=axis.group)
    return whole.movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """This rank's part of the sum over ranks, without a gradient."""
    whole = x.movedim(dim, 0).contiguous()
    part = whole.new_empty(whole.shape[0] // axis.size, *whole.shape[1:])
    _reduce_scatter(part, whole, group=axis.group)
    # Pipelines send what lies in one piece.
    return part.movedim(0, dim).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """Pass on."""
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Add up."""
        return all_reduce(grad, ctx.axis), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, axis: Axis) -> Tensor:
        """Add up."""
        return all_reduce(x, axis)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Pass on."""
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """Concatenate parts."""
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Add up, and keep this rank's part."""
        return reduce_scatter(grad, ctx.axis, dim=ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """Add up, and keep this rank's part."""
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(x, axis, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Concatenate parts."""
        return all_gather(grad, ctx.axis, dim=ctx.dim), None, None
