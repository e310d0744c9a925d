"""Running means, and curves with fewer points."""

import numpy as np
import pandas as pd
import pytest

from tokamake.report.page.series import measured, smooth, thinned


def test_smoothing_keeps_lines_straight_and_damps_noise() -> None:
    line = np.linspace(5, 1, 400)
    assert smooth(line)[:-10] == pytest.approx(line[:-10])
    noise = np.random.default_rng(0).normal(0, 1, 400)
    assert smooth(line + noise)[50:350].std() < (line + noise)[50:350].std()
    assert abs(smooth(noise)[50:350]).mean() < 0.5 * abs(noise[50:350]).mean()
    assert smooth(np.array([2.0])).tolist() == [2.0]


def test_a_thinned_curve_keeps_its_ends_and_each_spike() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 5000)
    y[[777, 54_321]] = 9, -9
    few_x, few_y = thinned(x, y, max_points=500)
    assert len(few_x) <= 500
    assert (few_x[0], few_x[-1]) == (0, 99_999)
    assert {777, 54_321} <= {*few_x}
    assert (few_y == y[few_x.astype(int)]).all()
    assert (np.diff(few_x) > 0).all()
    # No stretch is empty: a line through the points is the curve, within its own steps.
    assert abs(np.interp(x, few_x, few_y) - y)[60_000:].max() < 0.1


def test_a_short_curve_stays() -> None:
    x = np.arange(500.0)
    assert thinned(x, x, max_points=500)[0] is x


def test_metrics_are_found_by_kind() -> None:
    history = pd.DataFrame(
        {"step": [1, 2], "loss": [3.0, None], "loss/a": [None, 2.0], "loss/b": [None, None]}
    )
    found = measured(history, "loss")
    assert {name: [*map(list, points)] for name, points in found.items()} == {
        "": [[1], [3]], "a": [[2], [2]],
    }  # fmt: skip
