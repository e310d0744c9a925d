"""AdamW with 8-bit moments, from torchao."""

import sys
from typing import Any

import pytest
import torch

from tests.support.optimizers import LOW_BIT, make, start, walk
from tokamake.errors import UserError


@LOW_BIT
def test_8bit_stays_near_adamw() -> None:
    torch.manual_seed(0)
    initial = torch.randn(64, 128)
    changes = []
    for name in ("adamw", "adamw_8bit"):
        weight = torch.nn.Parameter(initial.clone())
        optimizer = make(name, {"weight": weight})
        for step in range(20):
            torch.manual_seed(step)
            gradient = {"weight": weight.detach() + 0.1 * torch.randn(64, 128)}
            walk(optimizer, {"weight": weight}, gradient, rate=0.01, decay=0.1)
        changes.append(weight.detach() - initial)
    assert optimizer.state[weight]["exp_avg"].codes.dtype == torch.uint8
    assert (changes[1] - changes[0]).norm() < 0.05 * changes[0].norm()


def test_8bit_without_torchao_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"adamw_8bit: .*; run `pip install torchao`"):
        make("adamw_8bit", start())


@LOW_BIT
def test_8bit_moments_are_restored_from_plain_tensors() -> None:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 128).reshape(64, 128))
    optimizer: Any = make("adamw_8bit", {"weight": parameter})
    for number in range(3):
        gradient = {"weight": torch.sin(parameter.detach() * (number + 2))}
        walk(optimizer, {"weight": parameter}, gradient, rate=0.01, decay=0.1)
    for kind in ("exp_avg", "exp_avg_sq"):
        value = optimizer.state[parameter][kind]
        assert value.codes.dtype == torch.uint8
        plain = optimizer.plain(value)
        assert type(plain) is torch.Tensor
        packed = optimizer.packed(parameter, kind, plain)
        assert packed.codes.dtype == torch.uint8
        # Rounding to 8 bits again has an error relative to the largest value of a block.
        assert (packed.dequantize() - plain).abs().max() <= 0.01 * plain.abs().max()
