"""Compare matrix products of linear layers with torch's own."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from tokamake.models.common import recompute
from tokamake.models.common.recompute import Recompute
from tokamake.parallel import linear

needs_onednn = pytest.mark.skipif(
    linear.onednn_linear is None,
    reason="needs a torch with MKL and oneDNN: pip install torch on x86",
)


class Counted:
    """oneDNN's product with a count of its calls."""

    def __init__(self) -> None:
        self.calls, self._operator = 0, linear.onednn_linear

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """See `linear.onednn_linear`."""
        self.calls += 1
        y: torch.Tensor = self._operator(*arguments)
        return y


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    torch.manual_seed(0)
    operator = Counted()
    monkeypatch.setattr(linear, "onednn_linear", operator)
    return operator


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_large_products_and_gradients_equal_torchs(
    counted: Counted, bias: bool, transposed: bool
) -> None:
    x = torch.randn(4, 128, 256).requires_grad_()
    weight, offset = torch.randn(192, 256), torch.randn(192) if bias else None
    leaves = [
        x,
        weight.requires_grad_(),
        *([offset.requires_grad_()] if offset is not None else []),
    ]
    # Gradients of transposed tensors, such as those from attention, are not contiguous.
    upstream = torch.randn(4, 192, 128).mT if transposed else torch.randn(4, 128, 192)
    expected = F.linear(x, weight, offset)
    y = linear.linear(x, weight, offset)
    assert_close(y, expected, rtol=1e-5, atol=1e-4)
    assert y._base is None  # FSDP2 warns about views
    pairs = zip(
        torch.autograd.grad(y, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    )
    for ours, theirs in pairs:
        assert_close(ours, theirs, rtol=1e-5, atol=1e-3)
    assert counted.calls == 2


@needs_onednn
def test_only_required_gradients_are_computed(counted: Counted) -> None:
    x, weight = torch.randn(512, 256), torch.randn(192, 256).requires_grad_()
    linear.linear(x, weight).sum().backward()
    assert counted.calls == 1
    assert weight.grad is not None
    with torch.no_grad():
        assert_close(linear.linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-4)
    assert counted.calls == 2


def test_small_and_fast_bf16_products_are_torchs(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "has_fast_bf16", lambda: True)
    for x, weight in (
        (torch.randn(2, 16), torch.randn(8, 16)),
        (torch.randn(512, 256).bfloat16(), torch.randn(192, 256).bfloat16()),
    ):
        assert torch.equal(linear.linear(x, weight), F.linear(x, weight))
    assert counted.calls == 0


@pytest.mark.parametrize(
    ("dtype", "tokens"), [(torch.float16, 2), (torch.float16, 512), (torch.bfloat16, 512)]
)
def test_products_in_16_bits_are_fp32_rounded_once(
    dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "has_fast_bf16", lambda: False)
    torch.manual_seed(0)
    halves = [torch.randn(tokens, 256), torch.randn(192, 256), torch.randn(192)]
    halves = [tensor.to(dtype).requires_grad_() for tensor in halves]
    wholes = [tensor.detach().double().requires_grad_() for tensor in halves]
    upstream = torch.randn(tokens, 192).to(dtype)
    y, expected = linear.linear(*halves), F.linear(*wholes)
    pairs = [
        (y, expected),
        *zip(
            torch.autograd.grad(y, halves, upstream),
            torch.autograd.grad(expected, wholes, upstream.double()),
            strict=True,
        ),
    ]
    for ours, exact in pairs:
        assert ours.dtype == dtype
        assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


PROCESSORS = {
    "Xeon with AMX": ({"cpu_name": "Intel Xeon", "amx_bf16": True, "avx512_bf16": True}, True),
    "Xeon without": ({"cpu_name": "Intel Xeon", "amx_bf16": False, "avx512_bf16": True}, False),
    "AMD Zen 4": ({"cpu_name": "AMD EPYC", "amx_bf16": False, "avx512_bf16": True}, True),
    "AMD Zen 3": ({"cpu_name": "AMD EPYC", "amx_bf16": False, "avx512_bf16": False}, False),
}


@pytest.mark.parametrize(("processor", "is_fast"), PROCESSORS.values(), ids=PROCESSORS)
def test_the_processor_decides_about_bf16(
    processor: dict[str, Any], is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear.has_fast_bf16.cache_clear()
    found = {"architecture": "x86_64", **processor}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert linear.has_fast_bf16() == is_fast
    linear.has_fast_bf16.cache_clear()


class Products(nn.Module):
    """Two large, costly products and a cheap activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply twice."""
        return linear.linear(F.silu(linear.linear(x, self.weight)), self.weight)


@needs_onednn
def test_selective_recomputation_keeps_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selective recomputation keeps the results of listed operators; oneDNN's must be listed."""
    operators: dict[str, int] = {}

    class CountOperators(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = str(function)
            operators[name] = operators.get(name, 0) + 1
            return function(*args, **(kwargs or {}))

    x = torch.randn(512, 256).requires_grad_()
    for granularity, products in (("selective", 4), ("full", 6)):
        torch.manual_seed(0)
        operators.clear()
        with CountOperators():
            y = recompute.run([Products()], Recompute(granularity), x)  # type: ignore[arg-type]
            y.sum().backward()
        assert operators["mkldnn._linear_pointwise.default"] == products
