"""Products of groups by both ways equal a loop over groups, empty groups included."""

import pytest
import torch

from tokamake.parallel import grouped_linear
from tokamake.parallel.grouped_linear import groups_of
from tokamake.runtime.device_types import has_grouped_mm

COUNTS = [3, 0, 5, 0, 1]


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_group_has_its_own_weight(
    has_kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_kernel and not has_grouped_mm():
        pytest.skip("this version of torch has no grouped_mm; use 2.10 or later")
    monkeypatch.setattr(grouped_linear, "_has_kernel", lambda *_: has_kernel)
    torch.manual_seed(1)
    x = torch.randn(sum(COUNTS), 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(COUNTS), 24, 16, dtype=dtype, requires_grad=True)
    factors = torch.randn(sum(COUNTS), 24, dtype=dtype)
    groups = groups_of(torch.tensor(COUNTS), x, width=24)
    assert isinstance(groups, torch.Tensor) == has_kernel
    product = grouped_linear.grouped_linear(x, weight, groups)
    gradients = torch.autograd.grad((product * factors).sum(), (x, weight))
    parts = [rows @ weight[number].T for number, rows in enumerate(x.split(COUNTS))]
    expected = torch.cat(parts)
    of_loop = torch.autograd.grad((expected * factors).sum(), (x, weight))
    for own, right in zip((product, *gradients), (expected, *of_loop), strict=True):
        torch.testing.assert_close(own, right)
    assert not gradients[1][1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [3, 64])
def test_products_are_rounded_once(dtype: torch.dtype, rows: int) -> None:
    """Against fp64; with few rows, and with many, whose products may be computed in fp32."""
    torch.manual_seed(2)
    counts = [rows, 0, 2 * rows]
    x = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 24, 16, dtype=dtype, requires_grad=True)
    bias = torch.randn(3, 24, dtype=dtype, requires_grad=True)
    factors = torch.randn(sum(counts), 24, dtype=dtype)
    product = grouped_linear.grouped_linear(x, weight, counts, bias)
    gradients = torch.autograd.grad(product, (x, weight, bias), factors)
    exact_x, exact_weight, exact_bias = (
        each.detach().double().requires_grad_() for each in (x, weight, bias)
    )
    parts = enumerate(exact_x.split(counts))
    exact = torch.cat([part @ exact_weight[n].T + exact_bias[n] for n, part in parts])
    inputs = (exact_x, exact_weight, exact_bias)
    right = torch.autograd.grad(exact, inputs, factors.double())
    for own, exactly in zip((product, *gradients), (exact, *right), strict=True):
        assert own.dtype == dtype
        error = (own.double() - exactly).norm() / exactly.norm()
        assert error < (1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)


def test_only_some_devices_have_the_kernel() -> None:
    assert not grouped_linear._has_kernel(torch.zeros(1, 16, dtype=torch.bfloat16), 16)
    meta = torch.zeros(1, 16, dtype=torch.bfloat16, device="meta")
    assert not grouped_linear._has_kernel(meta, 16)
