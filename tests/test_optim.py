"""Optimizers against their published update rules; which parameters decay."""

import torch

from tokamake.config import OptimizerSettings
from tokamake.optim import adamw, sgd
from tokamake.optim._groups import parameter_groups

SETTINGS = OptimizerSettings(
    learning_rate=0.1, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.5
)


def parameters() -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    values = {
        "weight": torch.randn(3, 2, dtype=torch.float64),
        "norm": torch.randn(4, dtype=torch.float64),
    }
    return {name: torch.nn.Parameter(value) for name, value in values.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step + 1)
    return {name: torch.randn_like(value) for name, value in parameters().items()}


def test_groups_decay_matrices_alone() -> None:
    named = parameters()
    named["frozen"] = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    decaying, plain = parameter_groups(named.items(), 0.5)
    assert decaying["weight_decay"] == 0.5
    assert [id(p) for p in decaying["params"]] == [id(named["weight"])]
    assert plain["weight_decay"] == 0.0
    assert [id(p) for p in plain["params"]] == [id(named["norm"])]


def test_groups_without_norms() -> None:
    groups = parameter_groups([("weight", parameters()["weight"])], 0.5)
    assert len(groups) == 1


def run(module: object, steps: int) -> dict[str, torch.nn.Parameter]:
    named = parameters()
    groups = parameter_groups(named.items(), SETTINGS.weight_decay)
    optimizer = module.build(groups, SETTINGS)  # type: ignore[attr-defined]
    for step in range(steps):
        for name, gradient in gradients(step).items():
            named[name].grad = gradient
        optimizer.step()
    return named


def test_adamw_follows_its_paper() -> None:
    found = run(adamw, 3)
    for name, start in parameters().items():
        value, mean, square = start.detach().clone(), 0.0, 0.0
        decay = SETTINGS.weight_decay if name == "weight" else 0.0
        for step in range(3):
            gradient = gradients(step)[name]
            mean = 0.8 * mean + 0.2 * gradient
            square = 0.9 * square + 0.1 * gradient**2
            corrected = (square / (1 - 0.9 ** (step + 1))) ** 0.5
            update = mean / (1 - 0.8 ** (step + 1)) / (corrected + 1e-3)
            value = value - 0.1 * update - 0.1 * decay * value
        torch.testing.assert_close(found[name].detach(), value)


def test_sgd_follows_momentum() -> None:
    found = run(sgd, 3)
    for name, start in parameters().items():
        value, velocity = start.detach().clone(), 0.0
        decay = SETTINGS.weight_decay if name == "weight" else 0.0
        for step in range(3):
            velocity = 0.8 * velocity + gradients(step)[name] + decay * value
            value = value - 0.1 * velocity
        torch.testing.assert_close(found[name].detach(), value)
