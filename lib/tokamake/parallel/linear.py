"""The matrix product of a linear layer, by the fastest library that the device has for it.

torch's own everywhere but on CPUs. For fp32 on x86 it takes MKL there, and oneDNN, which comes with
torch as well, needed a fifth to a third less time forward and for the gradient of the input on an
AMD EPYC with AVX-512, and more for that of the weight. With fp16 torch's own took 4 to 160 times as
long as with fp32 there, so such products are made in fp32 and rounded, as those of GPUs are.
Shape suffixes: N tokens, D width in, E width out.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.linear(x, weight_ED, bias_E)
    is_half = x.dtype == weight_ED.dtype == torch.float16
    if not is_half and not _by_onednn(x, weight_ED):
        return F.linear(x, weight_ED, bias_E)
    y: Tensor = _Linear.apply(x, weight_ED, bias_E)
    return y


def _by_onednn(x: Tensor, weight_ED: Tensor) -> bool:
    return bool(
        ONEDNN
        and x.dtype == weight_ED.dtype == torch.float32
        and x.numel() * len(weight_ED) >= _FEWEST
        and torch.backends.mkldnn.enabled
    )


def _product(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """In fp32; by oneDNN where that is faster."""
    x, weight_ED = x.float(), weight_ED.float()
    bias_E = None if bias_E is None else bias_E.float()
    if not _by_onednn(x, weight_ED):
        return F.linear(x, weight_ED, bias_E)
    y: Tensor = ONEDNN(x, weight_ED, bias_E, "none", [], "")
    # It is a view of itself, of which FSDP2 would warn.
    return y.data


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        """In the dtype of the states."""
        ctx.save_for_backward(x, weight_ED)
        return _product(x, weight_ED, bias_E).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """By oneDNN for the input, by MKL for the weight."""
        x, weight_ED = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_NE = grad.flatten(0, -2).float()
        return (
            _product(grad, weight_ED.t()).to(x.dtype) if of_x else None,
            (grad_NE.t() @ x.flatten(0, -2).float()).to(x.dtype) if of_weight else None,
            grad_NE.sum(0).to(x.dtype) if of_bias else None,
        )
