"""Copies of micro batches to the device."""

import numpy as np
import pytest
import torch

from tests.support.accelerators import DEVICE, on_accelerator
from tokamake.train.batch import to_device

BATCH = np.arange(24).reshape(4, 6)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors that were pinned; needs no accelerator."""
    tensors: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor.clone())
        return tensors[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return tensors


def test_cpu_batches_are_not_copied(pinned: list[torch.Tensor]) -> None:
    tensor = to_device(BATCH, torch.device("cpu"))
    assert not pinned
    assert (tensor.dtype, tensor.data_ptr()) == (torch.int64, BATCH.ctypes.data)
    np.testing.assert_array_equal(tensor.numpy(), BATCH)


def test_accelerator_batches_are_pinned_and_copied_asynchronously(
    pinned: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    to = torch.Tensor.to

    def recorded(tensor: torch.Tensor, device: torch.device, **options: bool) -> torch.Tensor:
        calls.append((tensor, options))
        return to(tensor, device, **options)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    tensor = to_device(BATCH, torch.device("meta"))
    assert (tensor.device.type, tensor.shape, tensor.dtype) == ("meta", (4, 6), torch.int64)
    ((copied, options),) = calls
    assert copied is pinned[0]
    assert options == {"non_blocking": True}
    np.testing.assert_array_equal(copied.numpy(), BATCH)


@on_accelerator
def test_gpu_batches_keep_their_values() -> None:
    for number in range(50):  # reused memory must not be overwritten too early
        batches = [to_device(BATCH + number + part, DEVICE) for part in range(3)]
        for part, batch in enumerate(batches):
            np.testing.assert_array_equal(batch.cpu().numpy(), BATCH + number + part)
