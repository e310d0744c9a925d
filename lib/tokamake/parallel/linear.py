"""The matrix product of a linear layer, by the fastest library that the device has for it.

torch's own everywhere but on x86 CPUs: there it takes MKL for fp32, and oneDNN, which comes with
torch as well, needs a fifth to a third less time forward and for the gradient of the input, and
more for that of the weight (`benchmarks/RESULTS.md`).
Shape suffixes: N tokens, D width in, E width out.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_FEWEST = 2**24
"""Multiply-adds from which oneDNN's time to prepare a product does not matter."""


def _onednn() -> Any:
    # torch's own compiler calls it; there is no public name.
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


ONEDNN: Any = _onednn() if torch.backends.mkl.is_available() else None
"""oneDNN's product of states and a weight (E, D); none where torch does not take MKL."""


def linear(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, but for the order in which a CPU adds up products.

    Args:
        x: (..., D).
        weight_ED: (E, D).
        bias_E: (E,), if any.

    Returns:
        (..., E).
    """
    if not _is_faster(x, weight_ED):
        return F.linear(x, weight_ED, bias_E)
    y: Tensor = _Linear.apply(x, weight_ED, bias_E)
    return y


def _is_faster(x: Tensor, weight_ED: Tensor) -> bool:
    return bool(
        ONEDNN
        and x.device.type == "cpu"
        and x.dtype == weight_ED.dtype == torch.float32
        and x.numel() * len(weight_ED) >= _FEWEST
        and torch.backends.mkldnn.enabled
        and not torch.compiler.is_compiling()
    )


def _product(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    y: Tensor = ONEDNN(x, weight_ED, bias_E, "none", [], "")
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        """By oneDNN."""
        ctx.save_for_backward(x, weight_ED)
        return _product(x, weight_ED, bias_E)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """By oneDNN for the input, by MKL for the weight."""
        x, weight_ED = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_NE = grad.flatten(0, -2)
        return (
            _product(grad, weight_ED.t()) if of_x else None,
            grad_NE.t() @ x.flatten(0, -2) if of_weight else None,
            grad_NE.sum(0) if of_bias else None,
        )
