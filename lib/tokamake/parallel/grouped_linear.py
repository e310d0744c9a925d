"""Matrix products of groups of tokens, each group with a weight of its own, such as an expert's.

Rows are sorted by group. A device with a kernel for it (`runtime.device_types`) computes all groups
in one. Elsewhere, each group is a product of its own, which is written into its place in the
result: nothing is stacked or concatenated. Both are exact.
Shape suffixes: R rows, D width in, E width out, G groups.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tokamake.parallel.linear import has_fast_bf16, linear, write_product
from tokamake.runtime.device import copied_to
from tokamake.runtime.device_types import device_type

_ALIGNED_BYTES = 16
"""Rows of matrices begin at multiples of this for the kernel."""
_FEWEST_ROWS = 32
"""Mean rows of a group for which casts of its weight take little of the time of the product."""

Groups = Tensor | Sequence[int]
"""(G,) int32 row where each group ends, on the device; or number of rows of each group."""


def groups_of(
    counts_G: Tensor, x_RD: Tensor, *, width: int, lengths: list[int] | None = None
) -> Groups:
    """Groups in the form that the product of x needs; lengths on the host wait for the device.

    Args:
        counts_G: (G,) int64 rows of each group.
        x_RD: rows, or other states of their width, dtype and device.
        width: of the states between the products.
        lengths: the counts, if the host knows them.
    """
    if _has_kernel(x_RD, width):
        return counts_G.cumsum(0).int()
    known: list[int] = counts_G.tolist() if lengths is None else lengths
    return known


def _has_kernel(x_RD: Tensor, width: int) -> bool:
    return (
        x_RD.dtype == torch.bfloat16
        and device_type(x_RD.device).has_grouped_product()
        and all(size * x_RD.itemsize % _ALIGNED_BYTES == 0 for size in (x_RD.shape[-1], width))
    )


def grouped_linear(
    x_RD: Tensor, weight_GED: Tensor, groups: Groups, bias_GE: Tensor | None = None
) -> Tensor:
    """(R, E): each row of x times the weight (E, D) of its group, plus its bias.

    Groups may be empty.
    """
    if not len(x_RD):  # the gradient of all weights is 0, but exists
        return linear(x_RD, weight_GED[0], None if bias_GE is None else bias_GE[0])
    if isinstance(groups, Tensor):
        product: Tensor = F.grouped_mm(x_RD, weight_GED.transpose(1, 2), offs=groups)
        if bias_GE is None:
            return product
        rows = torch.arange(len(x_RD), device=x_RD.device)
        return product + bias_GE[torch.searchsorted(groups, rows, right=True)]
    product = _GroupedProduct.apply(x_RD, groups, weight_GED)
    if bias_GE is None:
        return product
    repeats = copied_to(torch.tensor(groups), x_RD.device)
    return product + bias_GE.repeat_interleave(repeats, 0, output_size=len(x_RD))


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Groups that are not empty, and their rows."""
    start = 0
    for group, length in enumerate(lengths):
        if length:
            yield group, slice(start, start + length)
        start += length


def _dtype(x_RD: Tensor, num_groups: int) -> torch.dtype:
    """Precision of the products, as in `linear`."""
    if x_RD.device.type != "cpu" or x_RD.dtype not in (torch.float16, torch.bfloat16):
        return x_RD.dtype
    is_slow = x_RD.dtype == torch.float16 or (
        len(x_RD) >= _FEWEST_ROWS * num_groups and not has_fast_bf16()
    )
    return torch.float32 if is_slow else x_RD.dtype


class _GroupedProduct(torch.autograd.Function):
    """The product of each group's rows, in fp32 where that is faster, rounded to the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, lengths: Sequence[int], weight_GED: Tensor) -> Tensor:
        """Write the product of each group into its rows."""
        ctx.save_for_backward(x_RD, weight_GED)
        ctx.lengths = lengths
        dtype = _dtype(x_RD, len(lengths))
        product_RE = x_RD.new_empty(len(x_RD), weight_GED.shape[1])
        for group, rows in _spans(lengths):
            weight_ED = weight_GED[group].to(dtype)
            write_product(product_RE[rows], x_RD[rows].to(dtype), weight_ED=weight_ED)
        return product_RE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RE: Tensor) -> tuple[Tensor | None, None, Tensor]:
        """Write the gradients of each group into its rows, and into its part of the stack."""
        x_RD, weight_GED = ctx.saved_tensors
        dtype = _dtype(x_RD, len(ctx.lengths))
        of_x_RD = torch.empty_like(x_RD) if ctx.needs_input_grad[0] else None
        of_weight_GED = torch.empty_like(weight_GED)
        for group, length in enumerate(ctx.lengths):
            if not length:
                of_weight_GED[group] = 0
        for group, rows in _spans(ctx.lengths):
            grad, x = grad_RE[rows].to(dtype), x_RD[rows].to(dtype)
            if of_x_RD is not None:
                weight_DE = weight_GED[group].to(dtype).t()
                write_product(of_x_RD[rows], grad, weight_ED=weight_DE)
            if weight_GED.dtype == dtype:
                torch.mm(grad.t(), x, out=of_weight_GED[group])
            else:
                of_weight_GED[group] = grad.t() @ x
        return of_x_RD, None, of_weight_GED
