"""The matrix product of a linear layer, by the fastest library of the device.

Except on CPUs, this is torch's own. On CPUs:
- fp32 on x86: torch calls MKL. oneDNN, which torch includes, takes 20 to 33 % less time for the
  forward pass and the gradient of the input (AMD EPYC with AVX-512), but more for the weight's. For
  a few tokens, as when text is generated, it takes half the time if the weight is not small.
- fp16: torch takes 4 to 160 times as long as for fp32. So products are computed in fp32 and
  rounded, as on GPUs.
- bf16: Intel's processors without matrix units (AMX) take 1.3 to 1.7 times as long as in fp32, the
  casts included (Xeon with AVX-512). So products of many tokens are computed in fp32 and rounded.
Shape suffixes: N tokens, D width in, E width out.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tokamake.runtime.torch_internals import onednn_linear

_FEWEST = 2**24
"""Multiply-adds of a product; below, the time that oneDNN needs to prepare it matters."""
_FEW_TOKENS = 32
_SMALL, _SMALL_IF_WIDE = 2**19, 2**16
"""Elements of a weight below which oneDNN is slower for so few tokens; the second number is for
layers that are wider out than in, whose work oneDNN divides well."""
_MANY_TOKENS = 256
"""Tokens for which the cast of the weight takes little of the time of the product."""


def linear(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x (..., D) times weight (E, D), plus bias; on a CPU, rounding differs from torch's."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.linear(x, weight_ED, bias_E)
    if not torch.is_grad_enabled() and _is_few(x, weight_ED):
        few: Tensor = onednn_linear(x, weight_ED, bias_E, "none", [], "")
        return few
    if not _is_faster_in_fp32(x, weight_ED) and not _is_faster_by_onednn(x, weight_ED):
        return F.linear(x, weight_ED, bias_E)
    y: Tensor = _Linear.apply(x, weight_ED, bias_E)
    return y


def _is_faster_in_fp32(x: Tensor, weight_ED: Tensor) -> bool:
    if x.dtype != weight_ED.dtype or x.dtype == torch.float32:
        return False
    has_many = x.numel() >= _MANY_TOKENS * x.shape[-1]
    return x.dtype == torch.float16 or (has_many and not has_fast_bf16())


@cache
def has_fast_bf16() -> bool:
    """Whether the processor multiplies bf16 faster than fp32: by matrix units, or AMD's vectors."""
    processor = _processor()
    if processor.get("architecture") != "x86_64":
        return True
    return bool(processor["amx_bf16"] or (processor["avx512_bf16"] and not _is_intel(processor)))


def _processor() -> dict[str, Any]:
    """The processor, as torch knows it."""
    read = getattr(torch.cpu, "get_capabilities", dict)  # earlier versions of torch lack it
    processor: dict[str, Any] = read()
    return processor


def _is_intel(processor: dict[str, Any]) -> bool:
    return str(processor.get("cpu_name")).startswith("Intel")


@cache
def _has_slow_mkl() -> bool:
    """Whether oneDNN is faster than MKL: on Intel's processors, both take the same time."""
    return not _is_intel(_processor())


def _is_faster_by_onednn(x: Tensor, weight_ED: Tensor) -> bool:
    return bool(
        onednn_linear
        and x.dtype == weight_ED.dtype == torch.float32
        and x.numel() * len(weight_ED) >= _FEWEST
        and torch.backends.mkldnn.enabled
    )


def _is_few(x: Tensor, weight_ED: Tensor) -> bool:
    """Whether oneDNN is faster for a few tokens."""
    width_out, width_in = weight_ED.shape
    return bool(
        onednn_linear
        and x.numel() <= _FEW_TOKENS * width_in
        and width_in * width_out >= (_SMALL_IF_WIDE if width_out > width_in else _SMALL)
        and x.dtype == weight_ED.dtype == torch.float32
        and torch.backends.mkldnn.enabled
    )


def _product(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Compute the product in fp32, by oneDNN where that is faster."""
    x, weight_ED = x.float(), weight_ED.float()
    bias_E = None if bias_E is None else bias_E.float()
    if not _is_faster_by_onednn(x, weight_ED):
        return F.linear(x, weight_ED, bias_E)
    y: Tensor = onednn_linear(x, weight_ED, bias_E, "none", [], "")
    # The operator returns a view of its own result, and FSDP2 warns about views.
    return y.data


def write_product(out_NE: Tensor, x_ND: Tensor, *, weight_ED: Tensor) -> None:
    """Write a product of tensors of one dtype into its place, without a gradient."""
    if x_ND.device.type == "cpu" and (
        _is_few(x_ND, weight_ED) or (_has_slow_mkl() and _is_faster_by_onednn(x_ND, weight_ED))
    ):
        assert onednn_linear is not None
        out_NE.copy_(onednn_linear(x_ND, weight_ED, None, "none", [], ""))
    elif out_NE.dtype == x_ND.dtype:
        torch.mm(x_ND, weight_ED.t(), out=out_NE)
    else:
        out_NE.copy_(x_ND @ weight_ED.t())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_ED)
        return _product(x, weight_ED, bias_E).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of the input (by oneDNN), the weight (by MKL) and the bias."""
        x, weight_ED = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_NE = grad.flatten(0, -2).float()
        return (
            _product(grad, weight_ED.t()).to(x.dtype) if needs_x else None,
            (grad_NE.t() @ x.flatten(0, -2).float()).to(x.dtype) if needs_weight else None,
            grad_NE.sum(0).to(x.dtype) if needs_bias else None,
        )
