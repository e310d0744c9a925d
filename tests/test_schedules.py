"""Learning-rate schedules against those of transformers, step by step."""

from typing import Any

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from tokamake import plugins
from tokamake.schedules import constant, cosine, linear

WARMUP, STEPS = 7, 40


def rates(make: Any, **arguments: float) -> list[float]:
    """Rates of a transformers schedule around a peak of 1, beyond the end too."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer, num_warmup_steps=WARMUP, **arguments)
    found = []
    for _ in range(STEPS + 5):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def ours(module: Any, min_ratio: float) -> list[float]:
    arguments = {"warmup_steps": WARMUP, "train_steps": STEPS, "min_ratio": min_ratio}
    return [module.factor(step, **arguments) for step in range(STEPS + 5)]


@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 1.0])
def test_cosine_equals_transformers(min_ratio: float) -> None:
    theirs = rates(
        get_cosine_with_min_lr_schedule_with_warmup,
        num_training_steps=STEPS,
        min_lr_rate=min_ratio,
    )
    # Beyond the end theirs rises again, ours stays.
    assert ours(cosine, min_ratio)[: STEPS + 1] == pytest.approx(theirs[: STEPS + 1])
    assert ours(cosine, min_ratio)[STEPS:] == pytest.approx([min_ratio] * 5)


def test_linear_equals_transformers() -> None:
    theirs = rates(get_linear_schedule_with_warmup, num_training_steps=STEPS)
    assert ours(linear, 0.0) == pytest.approx(theirs)


def test_linear_ends_at_its_share() -> None:
    found = ours(linear, 0.2)
    assert found[WARMUP] == 1.0
    assert found[(WARMUP + STEPS) // 2] == pytest.approx(1 - 0.8 * 16 / 33)
    assert found[STEPS:] == pytest.approx([0.2] * 5)


def test_constant_equals_transformers() -> None:
    assert ours(constant, 0.1) == pytest.approx(rates(get_constant_schedule_with_warmup))


@pytest.mark.parametrize("name", plugins.names("schedules"))
def test_extremes(name: str) -> None:
    factor = plugins.load("schedules", name).factor
    assert factor(0, warmup_steps=0, train_steps=1, min_ratio=0.5) == 1.0
    assert factor(3, warmup_steps=4, train_steps=4, min_ratio=0.5) == 0.75
