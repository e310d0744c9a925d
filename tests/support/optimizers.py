"""Optimizers on a few small parameters: built, run for some steps, compared with references."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tokamake import plugins
from tokamake.config.optimization import OptimizerSettings
from tokamake.optim._extra_pass import ExtraPass, Relabel
from tokamake.optim._groups import parameter_groups, set_rates
from tokamake.optim._sharded_parameters import UNSHARDED

Arrays = dict[str, npt.NDArray[np.float64]]

NAMES = plugins.names("optim")
LOW_BIT = pytest.mark.extra("low-bit", "torchao")
CASES = [pytest.param(name, marks=[LOW_BIT] if name == "adamw_8bit" else []) for name in NAMES]
RATES = [0.0, 0.05, 0.1, 0.08]
ADAM = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}


def start(dtype: torch.dtype = torch.float64) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (7, 4),
        "layers.0.wide.weight": (3, 5),
        "layers.0.tall.weight": (6, 4),
    }
    shapes |= {"layers.0.norm.weight": (4,), "head.weight": (7, 4)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: torch.nn.Parameter(value.to(dtype)) for name, value in values.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    values = {name: torch.randn(p.shape, generator=generator) for name, p in start().items()}
    return {name: value.double() * 0.3 for name, value in values.items()}


def make(name: str, parameters: dict[str, torch.nn.Parameter], **values: Any) -> Any:
    settings = OptimizerSettings(name=name, **values)
    groups = parameter_groups(parameters.items(), settings.used("weight_decay"))
    return plugins.load("optim", name).build(groups, settings, whole=UNSHARDED)


def extra_pass(
    gradients: Callable[[Relabel], int], labels: torch.Tensor | None = None, *, vocab_size: int = 4
) -> ExtraPass:
    """One micro batch of labels, (N,), for optimizers that relabel it."""
    labels = torch.zeros(3, dtype=torch.int64) if labels is None else labels
    return ExtraPass(
        gradients=gradients,
        labels=[labels],
        label_numbers=[torch.arange(len(labels))],
        label_shape=lambda: (1, len(labels)),
        vocab_size=vocab_size,
        seed=1,
    )


def trained(name: str, *, dtype: torch.dtype = torch.float64, **values: Any) -> Arrays:
    """Parameters after some steps with rates that change."""
    parameters = start(dtype)
    optimizer = make(name, parameters, **values)
    decay = OptimizerSettings(name=name, **values).used("weight_decay")
    for step, rate in enumerate(RATES):
        walk(optimizer, parameters, gradients(step), rate=rate, decay=decay)
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return {each: parameter.detach().double().numpy() for each, parameter in parameters.items()}


def walk(
    optimizer: Any,
    parameters: dict[str, torch.nn.Parameter],
    gradients: dict[str, torch.Tensor],
    *,
    rate: float,
    decay: float,
) -> None:
    """One step, as the trainer does it."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.to(parameters[name].dtype)
    set_rates(optimizer, learning_rate=rate, weight_decay=decay)
    optimizer.step()


def reference(make_one: Callable[[Any], Any], decay: float) -> Arrays:
    """Parameters after the same steps by another optimizer, those that decay in the first group."""
    parameters = start()
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    optimizer = make_one(
        [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    )
    for step, rate in enumerate(RATES):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def assert_same(actual: Arrays, expected: Arrays, rtol: float = 1e-7) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=rtol, atol=1e-9, err_msg=name)
