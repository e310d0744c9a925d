"""Judgement of steps: numbers that are not finite, spikes, and what a checkpoint keeps of them."""

import json
import math
import random

import pytest

from tokamake.config.stability import BadStepSettings
from tokamake.train import bad_steps
from tokamake.train.bad_steps import (
    BadStep,
    GuardState,
    bad_ranks,
    described,
    judge,
    robust_score,
)

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
    assert judge(SPIKES, (), loss=loss, grad_norm=norm) == BadStep("not_finite", "skip", reason)
    assert judge(BadStepSettings(), (), loss=loss, grad_norm=norm) == BadStep(
        "not_finite", "stop", reason
    )


def test_steps_of_the_usual_noise_are_good() -> None:
    recent, later = usual()[:WINDOW], usual(1000)[WINDOW:]
    assert [judge(SPIKES, recent, loss=loss, grad_norm=norm) for loss, norm in later] == [
        None
    ] * len(later)


def test_a_spike_of_the_loss_or_of_the_gradient_norm_is_bad() -> None:
    of_loss, of_norm = (
        judge(SPIKES, usual(), loss=6.0, grad_norm=0.5),
        judge(SPIKES, usual(), loss=3.0, grad_norm=5.0),
    )
    assert of_loss
    assert (of_loss.case, of_loss.action) == ("spike", "rewind")
    assert of_loss.reason.startswith("loss: 6, ")
    assert of_loss.reason.endswith(" of the last 16 good steps")
    assert of_norm
    assert of_norm.reason.startswith("gradient norm: 5, ")


def test_low_values_are_no_spikes() -> None:
    assert judge(SPIKES, usual(), loss=0.1, grad_norm=0.001) is None


def test_there_are_no_spikes_before_the_window_is_full_or_if_they_are_ignored() -> None:
    assert judge(SPIKES, usual(WINDOW - 1), loss=600.0, grad_norm=500.0) is None
    ignoring = SPIKES.model_copy(update={"spike": "ignore"})
    assert judge(ignoring, usual(), loss=600.0, grad_norm=500.0) is None


def test_spikes_are_journaled_by_default_and_update_the_weights() -> None:
    bad = judge(BadStepSettings(), usual(128), loss=600.0, grad_norm=0.5)
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


def test_the_window_keeps_the_last_good_steps() -> None:
    state = GuardState()
    for step in range(6):
        state = state.after_good(float(step), 10.0 * step, window=4)
    assert state.recent == ((2.0, 20.0), (3.0, 30.0), (4.0, 40.0), (5.0, 50.0))


def test_a_state_survives_json_bit_by_bit() -> None:
    state = GuardState(tuple(usual()), rate_factor=0.1, skipped=()).after_skip(9).after_skip(4, 9)
    assert state.skipped == (4, 9)
    assert GuardState.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert GuardState.from_json(json.loads(json.dumps(GuardState().to_json()))) == GuardState()


def test_only_what_has_changed_the_weights_is_an_effect() -> None:
    assert GuardState(tuple(usual())).effect(8) == {}
    state = GuardState(skipped=(3, 9))
    assert state.effect(2) == {}
    assert state.effect(3) == {"skipped": [3], "rate_factor": 1.0}
    assert state.effect(8) == {"skipped": [3], "rate_factor": 1.0}
    assert GuardState(rate_factor=0.5).effect(1) == {"skipped": [], "rate_factor": 0.5}


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ([(1.0, 2.0), (math.nan, math.nan), (1.0, math.nan)], [1]),
        ([(1.0, 2.0), (1.0, math.inf), (1.0, math.nan)], [1, 2]),
        ([(1.0, 2.0), (3.0, 1.0), (3.0, 1.0)], [1, 2]),
    ],
)
def test_ranks_that_a_bad_step_comes_from(
    values: list[tuple[float, float]], ranks: list[int]
) -> None:
    assert bad_ranks(values) == ranks


def test_ranks_are_named_as_ranges() -> None:
    assert described([3]) == "rank 3"
    assert described([0, 1]) == "ranks 0-1"
    assert described([0, 1, 2, 7, 9, 10]) == "ranks 0-2, 7, 9-10"


def test_ranges_before_the_position_have_no_effect() -> None:
    ranges = [(1, 3), (5, 5), (8, 12)]
    assert bad_steps.ranges_without_effect(ranges, 0) is None
    assert bad_steps.ranges_without_effect(ranges, 9) == (
        "no effect on steps 1 to 3, 5: training is already at step 9"
    )
