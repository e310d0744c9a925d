"""Limits of a job that `train` cannot take."""

import math

import pytest

from tokamake.errors import UserError
from tokamake.train.train import _check_minutes


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf, 1e9])
def test_minutes_that_are_no_time_are_refused(minutes: float) -> None:
    with pytest.raises(UserError, match=r"--minutes .*: give the minutes of this job, above 0"):
        _check_minutes(minutes)


@pytest.mark.parametrize("minutes", [None, 0.5, 600])
def test_minutes_are_optional(minutes: float | None) -> None:
    _check_minutes(minutes)
