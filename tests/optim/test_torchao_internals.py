"""Private names of torchao. A version that changes one fails by name."""

import pytest
import torch

from tests.support.optimizers import LOW_BIT, make
from tokamake.optim import _torchao_internals as internals


@LOW_BIT
@pytest.mark.parametrize("signed", [True, False])
def test_new_buffer(signed: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 128))
    buffer = internals.new_buffer(
        make("adamw_8bit", {"weight": parameter}), parameter, signed=signed
    )
    assert buffer.codes.dtype == torch.uint8
    values = torch.linspace(-1 if signed else 0, 1, 64 * 128).reshape(64, 128)
    restored = buffer.copy_(values).dequantize()
    assert (restored - values).abs().max() < 0.02
