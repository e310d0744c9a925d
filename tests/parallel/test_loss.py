"""Cross entropy equals torch's: in chunks, as compiled arithmetic, and compiled on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from tests.support.accelerators import DEVICE, on_accelerator
from tokamake.parallel import loss as loss_module
from tokamake.parallel.loss import NO_LABEL, cross_entropy

NUM_TOKENS, VOCABULARY = 40, 96
Computed = tuple[Tensor, Tensor]
"""Sum of the losses, and its gradient."""


def tokens(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and labels; two tokens have no label."""
    torch.manual_seed(0)
    logits = torch.randn(4, NUM_TOKENS // 4, VOCABULARY).mul(4).to(dtype)
    labels = torch.randint(VOCABULARY, (4, NUM_TOKENS // 4))
    labels[0, 3] = labels[2, 0] = NO_LABEL
    return logits, labels


def by_torch(logits: Tensor, labels: Tensor) -> Computed:
    leaf = logits.clone().float().requires_grad_()
    options = {"reduction": "sum", "ignore_index": NO_LABEL}
    total = F.cross_entropy(leaf.flatten(0, 1), labels.flatten(), **options)  # type: ignore[arg-type]
    (total * 0.5).backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


def ours(logits: Tensor, labels: Tensor, *, compiled: bool = False) -> Computed:
    leaf = logits.clone().requires_grad_()
    total = cross_entropy(leaf.clone(), labels, size=VOCABULARY, compiled=compiled)
    (total * 0.5).backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


def check(computed: Computed, expected: Computed, dtype: torch.dtype) -> None:
    rounded = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert_close(computed[0].cpu(), expected[0], rtol=1e-6, atol=1e-6)
    assert computed[1].dtype == dtype
    assert_close(computed[1].float().cpu(), expected[1], rtol=rounded, atol=1e-6)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("room", [1, 7 * 4 * VOCABULARY, 2**22])
def test_chunks_of_any_size_equal_torch(
    monkeypatch: pytest.MonkeyPatch, room: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(loss_module, "_ROOM_ON_CPU", room)
    logits, labels = tokens(dtype)
    check(ours(logits, labels), by_torch(logits, labels), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_arithmetic_that_is_compiled_equals_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    used: list[str] = []

    def uncompiled(function: Callable) -> Callable:
        used.append(function.__name__)
        return function

    monkeypatch.setattr(loss_module, "_compiled", uncompiled)
    monkeypatch.setattr(loss_module, "_is_compiled", lambda _, wanted: wanted)
    logits, labels = tokens(dtype)
    check(ours(logits, labels, compiled=True), by_torch(logits, labels), dtype)
    assert used == ["_log_sum_exp", "_to_gradient"]
    ours(logits, labels)
    assert len(used) == 2


@on_accelerator
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_equals_torch(dtype: torch.dtype, compiled: bool) -> None:
    logits, labels = tokens(dtype)
    computed = ours(logits.to(DEVICE), labels.to(DEVICE), compiled=compiled)
    check(computed, by_torch(logits, labels), dtype)


@on_accelerator
def test_compiled_arithmetic_holds_no_scores() -> None:
    logits = torch.randn(4096, 65536, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(65536, (4096,), device=DEVICE)
    module = getattr(torch, DEVICE.type)
    for _ in range(2):  # the first one compiles
        leaf = logits.clone().requires_grad_()
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        cross_entropy(leaf * 1, labels, size=65536, compiled=True).backward()
        peak = module.max_memory_allocated() - before
    # The product, whose memory becomes the gradient; `leaf.grad` may be a copy.
    assert peak < 2.2 * logits.nbytes
