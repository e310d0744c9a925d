"""The table of device types: its entries, and types that it lacks."""

import pytest
import torch

from tests.support.accelerators import DEVICE, on_accelerator
from tokamake.runtime.device_types import DEVICE_TYPES, DeviceType, device_type, holds_no_masks


def test_a_type_that_the_table_lacks_has_no_kernels() -> None:
    meta = torch.device("meta")
    entry = device_type(meta)
    assert entry == DeviceType("gloo")
    assert not entry.has_varlen(meta)
    assert not entry.has_grouped_product()
    assert entry.memory_bytes is entry.identity is None


@pytest.mark.parametrize(("kind", "expected"), [("cpu", False), ("cuda", True), ("xpu", False)])
def test_attention_holds_no_masks_with_a_kernel_for_documents(kind: str, expected: bool) -> None:
    assert holds_no_masks(kind) == expected


@pytest.mark.parametrize("check", ["can_use_flash_attention", "can_use_efficient_attention"])
def test_torch_checks_whether_fused_attention_serves_tensors(check: str) -> None:
    """It refuses tensors of a CPU."""
    tensors = [torch.zeros(1, 1, 32, 8)] * 3
    for kind in ("cpu", "cuda", "xpu"):
        allows = DEVICE_TYPES[kind].allows_attention
        assert not allows(check, tensors, causal=True, grouped=False)


@on_accelerator
def test_an_accelerator_has_its_memory() -> None:
    memory = device_type(DEVICE).memory_bytes
    assert memory is not None
    assert memory(DEVICE) > 2**30
