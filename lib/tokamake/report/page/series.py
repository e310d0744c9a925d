"""Curves of metrics: their points, a running mean, and fewer points that look the same."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]


def measured(history: pd.DataFrame, kind: str) -> dict[str, tuple[Floats, Floats]]:
    """Steps and values of the columns KIND and KIND/NAME, by NAME; "" is KIND itself."""
    found = {}
    for column in history:
        key, _, name = column.partition("/")
        if key == kind:
            lines = history[["step", column]].dropna()
            if len(lines):
                found[name] = (lines["step"].to_numpy(float), lines[column].to_numpy(float))
    return found


def smooth(values: Floats) -> Floats:
    """Centred running mean (n,) over about a twentieth of the values.

    The window is narrow at the start, where losses fall too fast to average over later values. At
    the end, it has no right half.
    """
    half_width, length = max(1, len(values) // 40), len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(length)
    half = np.minimum(places, half_width)
    starts, ends = places - half, np.minimum(places + half + 1, length)
    return (sums[ends] - sums[starts]) / (ends - starts)


def thinned(x: Floats, y: Floats, *, max_points: int) -> tuple[Floats, Floats]:
    """At most `max_points` of the points (n,): the lowest and the highest of each stretch.

    A spike of a single step stays visible, unlike with a mean. The first and the last point stay.
    """
    if len(x) <= max_points:
        return x, y
    bounds = np.linspace(1, len(x) - 1, max_points // 2, dtype=int)
    kept = {0, len(x) - 1}
    for start, stop in pairwise(bounds):
        kept |= {start + int(y[start:stop].argmin()), start + int(y[start:stop].argmax())}
    places = sorted(kept)
    return x[places], y[places]
