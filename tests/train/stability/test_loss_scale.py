"""Dynamic loss scaling in fp16, compared with Megatron and torch; other precisions have none."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tokamake.config.train_sections import LossScalingSettings
from tokamake.train.stability.loss_scale import LossScale


def scale_of(**settings: Any) -> LossScale:
    return LossScale("fp16", LossScalingSettings(**settings))


def norms(number: int, share: float) -> list[float]:
    """Gradient norms, some of them not finite."""
    generator = random.Random(0)
    return [math.inf if generator.random() < share else 1.0 for _ in range(number)]


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_an_overflow_halves_the_scale_and_skips_the_update(norm: float) -> None:
    scale = scale_of()
    assert scale.value == 2**16
    assert scale.overflowed(norm)
    assert scale.state == (2**15, 0)


def test_the_scale_doubles_after_finite_steps_in_a_row() -> None:
    scale = scale_of(window=3)
    assert [scale.overflowed(1.0) for _ in range(2)] == [False, False]
    scale.overflowed(math.inf)
    for _ in range(2):
        scale.overflowed(1.0)
    assert scale.state == (2**15, 2)
    assert not scale.overflowed(1.0)
    assert scale.state == (2**16, 0)


def test_the_scale_has_a_largest_value() -> None:
    scale = scale_of(window=1)
    for _ in range(20):
        scale.overflowed(1.0)
    assert scale.value == 2**32


def test_an_overflow_at_the_lowest_scale_is_no_matter_of_the_scale() -> None:
    scale = scale_of(min_scale=2.0**14)
    assert [scale.overflowed(math.inf) for _ in range(4)] == [True, True, False, False]
    assert scale.value == 2**14
    assert not scale.overflowed(1.0)


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
@pytest.mark.parametrize(("hysteresis", "share"), [(1, 0.1), (2, 0.1), (3, 0.3), (4, 0.02)])
def test_the_rules_are_those_of_megatron(
    hysteresis: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.optimizer import grad_scaler

    def on_cpu(value: Any, *, device: str, **options: Any) -> torch.Tensor:
        assert device == "cuda"
        return torch.tensor(value, **options)

    without_cuda = SimpleNamespace(tensor=on_cpu, float=torch.float, max=torch.max)
    monkeypatch.setattr(grad_scaler, "torch", without_cuda)
    theirs = grad_scaler.DynamicGradScaler(
        initial_scale=2.0**10,
        min_scale=4.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=7,
        hysteresis=hysteresis,
    )
    ours = scale_of(initial_scale=2.0**10, window=7, min_scale=4.0, hysteresis=hysteresis)
    scales = set()
    for norm in norms(500, share):
        ours.overflowed(norm)
        theirs.update(not math.isfinite(norm))
        assert ours.value == min(theirs.scale.item(), 2.0**32)
        scales.add(ours.value)
        if ours.value == 2.0**32:  # theirs has no largest value
            break
    assert len(scales) > 5


def test_without_hysteresis_the_rules_are_those_of_torch() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
    ours = scale_of(initial_scale=2.0**10, window=7, min_scale=2.0**-40)
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for norm in norms(300, 0.1):
        theirs.scale(weight)
        weight.grad = torch.tensor(norm)
        theirs.step(optimizer)
        theirs.update()
        ours.overflowed(norm)
        assert ours.value == theirs.get_scale()


def test_the_state_of_a_checkpoint_goes_on() -> None:
    scale, again = scale_of(hysteresis=3), scale_of(hysteresis=3)
    for norm in (1.0, math.inf, 1.0, 1.0):
        assert scale.overflowed(norm) == math.isinf(norm)
    again.state, again.num_tolerated = scale.state, scale.num_tolerated
    assert again.state == (2**16, 2)
    for each in (scale, again):
        assert [each.overflowed(math.inf) for _ in range(3)] == [True] * 3
        assert each.value == 2**14


def test_a_static_scale_stays_and_its_overflows_are_skipped() -> None:
    scale = scale_of(static=True, initial_scale=512.0)
    scale.state = (2.0**20, 7)  # of a run whose scale was dynamic
    for norm in (1.0, math.inf, 1.0, math.nan):
        assert scale.overflowed(norm) != math.isfinite(norm)
        assert scale.value == 512
    with pytest.raises(ValidationError, match="window: 5: has no effect on a static scale"):
        LossScalingSettings(static=True, window=5)


def test_a_checkpoint_of_another_precision_begins_with_the_initial_scale() -> None:
    scale = scale_of(initial_scale=128.0)
    scale.state = LossScale("bf16", LossScalingSettings()).state
    assert scale.state == (128.0, 0)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_other_precisions_have_no_scale(precision: str) -> None:
    scale = LossScale(precision, LossScalingSettings())
    scale.state = (8.0, 5)
    assert not scale.overflowed(math.inf)
    assert scale.state == (1.0, 0)
