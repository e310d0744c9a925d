"""Judgement of steps: numbers that are not finite, and spikes."""

import math
import random

import pytest

from tokamake.config.train_sections import BadStepSettings
from tokamake.train.bad_steps import BadStep
from tokamake.train.stability.spikes import find_fault, robust_score

WINDOW = 16
SPIKES = BadStepSettings(not_finite="skip", spike="rewind", spike_window=WINDOW)


def usual(number: int = WINDOW) -> list[tuple[float, float]]:
    """Loss and gradient norm of good steps: noise of 1 % and 10 %."""
    generator = random.Random(0)
    return [(generator.gauss(3.0, 0.03), generator.gauss(0.5, 0.05)) for _ in range(number)]


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (math.nan, 1.0, "loss: nan"),
        (math.inf, math.nan, "loss: inf"),
        (2.0, math.nan, "gradient norm: nan"),
        (2.0, -math.inf, "gradient norm: -inf"),
    ],
)
def test_numbers_that_are_not_finite_are_bad(loss: float, norm: float, reason: str) -> None:
    assert find_fault(SPIKES, (), loss=loss, grad_norm=norm) == BadStep(
        "not_finite", "skip", reason
    )
    assert find_fault(BadStepSettings(), (), loss=loss, grad_norm=norm) == BadStep(
        "not_finite", "stop", reason
    )


def test_steps_of_the_usual_noise_are_good() -> None:
    recent, later = usual()[:WINDOW], usual(1000)[WINDOW:]
    assert [find_fault(SPIKES, recent, loss=loss, grad_norm=norm) for loss, norm in later] == [
        None
    ] * len(later)


def test_a_spike_of_the_loss_or_of_the_gradient_norm_is_bad() -> None:
    of_loss, of_norm = (
        find_fault(SPIKES, usual(), loss=6.0, grad_norm=0.5),
        find_fault(SPIKES, usual(), loss=3.0, grad_norm=5.0),
    )
    assert of_loss
    assert (of_loss.case, of_loss.action) == ("spike", "rewind")
    assert of_loss.reason.startswith("loss: 6, ")
    assert of_loss.reason.endswith(" of the last 16 good steps")
    assert of_norm
    assert of_norm.reason.startswith("gradient norm: 5, ")


def test_low_values_are_no_spikes() -> None:
    assert find_fault(SPIKES, usual(), loss=0.1, grad_norm=0.001) is None


def test_there_are_no_spikes_before_the_window_is_full_or_if_they_are_ignored() -> None:
    assert find_fault(SPIKES, usual(WINDOW - 1), loss=600.0, grad_norm=500.0) is None
    ignoring = SPIKES.model_copy(update={"spike": "ignore"})
    assert find_fault(ignoring, usual(), loss=600.0, grad_norm=500.0) is None


def test_spikes_are_journaled_by_default_and_update_the_weights() -> None:
    bad = find_fault(BadStepSettings(), usual(128), loss=600.0, grad_norm=0.5)
    assert bad
    assert bad.action == "journal"
    assert bad.updates
    assert not bad._replace(action="rewind").updates


def test_a_score_counts_robust_standard_deviations() -> None:
    generator = random.Random(2)
    values = [generator.gauss(10, 2) for _ in range(4001)]
    assert robust_score(16, values) == pytest.approx(3, rel=0.05)
    assert robust_score(4, values) == pytest.approx(-3, rel=0.05)
    # A tenth of outliers hardly matters: with mean and standard deviation, it would be 0.2.
    assert robust_score(16, [*values, *[1000.0] * 400]) == pytest.approx(2.7, abs=0.3)


def test_equal_values_make_no_small_change_a_spike() -> None:
    assert robust_score(2.001, [2.0] * 9) == pytest.approx(0.5)
    assert robust_score(0.0, [0.0] * 9) == 0
    assert robust_score(1e-9, [0.0] * 9) > 1e100
