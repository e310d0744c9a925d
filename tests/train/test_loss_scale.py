"""Dynamic loss scaling in fp16; other precisions have none."""

import math

import pytest

from tokamake.errors import UserError
from tokamake.train import loss_scale
from tokamake.train.loss_scale import LossScale


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_an_overflow_halves_the_scale_and_skips_the_update(norm: float) -> None:
    scale = LossScale("fp16")
    assert scale.value == 2**16
    assert not scale.update(norm)
    assert scale.state == (2**15, 0)


def test_the_scale_doubles_after_finite_steps_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "_WINDOW", 3)
    scale = LossScale("fp16")
    assert [scale.update(1.0) for _ in range(2)] == [True, True]
    scale.update(math.inf)
    for _ in range(2):
        scale.update(1.0)
    assert scale.state == (2**15, 2)
    assert scale.update(1.0)
    assert scale.state == (2**16, 0)


def test_the_scale_has_a_largest_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "_WINDOW", 1)
    scale = LossScale("fp16")
    for _ in range(20):
        scale.update(1.0)
    assert scale.value == 2**32


def test_an_overflow_at_a_scale_of_one_ends_the_run() -> None:
    scale = LossScale("fp16")
    for _ in range(16):
        assert not scale.update(math.inf)
    assert scale.value == 1
    assert scale.update(1.0)
    with pytest.raises(UserError) as caught:
        scale.update(math.inf)
    assert str(caught.value) == (
        "train.precision: fp16: gradients overflow at a loss scale of 1; lower "
        "train.optimizer.learning_rate or take bf16"
    )


def test_the_state_of_a_checkpoint_goes_on() -> None:
    scale = LossScale("fp16")
    scale.state = (8.0, 5)
    scale.update(1.0)
    assert scale.state == (8.0, 6)


def test_a_checkpoint_of_another_precision_begins_with_the_initial_scale() -> None:
    scale = LossScale("fp16")
    scale.state = LossScale("bf16").state
    assert scale.state == (2**16, 0)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_other_precisions_have_no_scale(precision: str) -> None:
    scale = LossScale(precision)
    scale.state = (8.0, 5)
    assert scale.update(math.inf)
    assert scale.state == (1.0, 0)
