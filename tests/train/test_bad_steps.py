"""What a checkpoint keeps of bad steps, and what the log says of them."""

import json
import math

import pytest

from tokamake.checkpoint.native.resume_state import GuardState, ranges_without_effect
from tokamake.train.bad_steps import bad_ranks, described

GOOD = ((3.0, 0.5), (2.9, 0.6), (1 / 3, 0.1))
"""Loss and gradient norm of good steps."""


def test_the_window_keeps_the_last_good_steps() -> None:
    state = GuardState()
    for step in range(6):
        state = state.after_good(float(step), 10.0 * step, window=4)
    assert state.recent == ((2.0, 20.0), (3.0, 30.0), (4.0, 40.0), (5.0, 50.0))


def test_a_state_survives_json_bit_by_bit() -> None:
    state = GuardState(GOOD, rate_factor=0.1, skipped=()).after_skip(9).after_skip(4, 9)
    assert state.skipped == (4, 9)
    assert GuardState.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert GuardState.from_json(json.loads(json.dumps(GuardState().to_json()))) == GuardState()


def test_only_what_has_changed_the_weights_is_an_effect() -> None:
    assert GuardState(GOOD).effect(8) == {}
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
    assert ranges_without_effect(ranges, 0) is None
    assert ranges_without_effect(ranges, 9) == (
        "no effect on steps 1 to 3, 5: training is already at step 9"
    )
