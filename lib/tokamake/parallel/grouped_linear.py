"""Matrix products of groups of tokens, each group with a weight of its own, such as an expert's.

Rows are sorted by group. Nvidia GPUs compute all groups in one kernel. Elsewhere, each group is a
product of its own. Both are exact.
Shape suffixes: R rows, D width in, E width out, G groups.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokamake.parallel.linear import linear

_grouped_mm = getattr(F, "grouped_mm", None)  # torch 2.9 lacks it
_ALIGNED_BYTES = 16
"""Rows of matrices begin at multiples of this for the kernel."""

Groups = Tensor | Sequence[int]
"""(G,) int32 row where each group ends, on the device; or number of rows of each group."""


def groups_of(counts_G: Tensor, x_RD: Tensor, *, width: int) -> Groups:
    """Groups in the form that the product of x needs; lengths on the host wait for the device.

    Args:
        counts_G: (G,) int64 rows of each group.
        width: of the states between the products.
    """
    if _has_kernel(x_RD, width):
        return counts_G.cumsum(0).int()
    lengths: list[int] = counts_G.tolist()
    return lengths


def _has_kernel(x_RD: Tensor, width: int) -> bool:
    return (
        _grouped_mm is not None
        and x_RD.device.type == "cuda"
        and torch.version.hip is None
        and x_RD.dtype == torch.bfloat16
        and all(size * x_RD.itemsize % _ALIGNED_BYTES == 0 for size in (x_RD.shape[-1], width))
    )


def grouped_linear(
    x_RD: Tensor, weight_GED: Tensor, groups: Groups, bias_GE: Tensor | None = None
) -> Tensor:
    """(R, E): each row of x times the weight (E, D) of its group, plus its bias.

    Groups may be empty.
    """
    biases = [None] * len(weight_GED) if bias_GE is None else bias_GE.unbind()
    if not len(x_RD):  # the gradient of all weights is 0, but exists
        return linear(x_RD, weight_GED[0], biases[0])
    if isinstance(groups, Tensor):
        assert _grouped_mm is not None
        product: Tensor = _grouped_mm(x_RD, weight_GED.transpose(1, 2), offs=groups)
        if bias_GE is None:
            return product
        rows = torch.arange(len(x_RD), device=x_RD.device)
        return product + bias_GE[torch.searchsorted(groups, rows, right=True)]
    parts = zip(x_RD.split(groups), weight_GED.unbind(), biases, strict=True)
    return torch.cat([linear(x, weight, bias) for x, weight, bias in parts if len(x)])
