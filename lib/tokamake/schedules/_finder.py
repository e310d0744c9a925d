"""Learning-rate finder: a sweep of exponentially growing rates, and the rate that it suggests.

Smith 2015, arXiv 1506.01186, section 3.3; the suggestion is the point of steepest descent, as in
fastai.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokamake.errors import UserError

FEWEST = 10
"""Minimum number of steps for a suggestion."""

Floats = npt.NDArray[np.float64]


def sweep(start: float, end: float, *, steps: int) -> list[float]:
    """Learning rate of each step of the sweep, from `start` to `end` by equal factors."""
    return [float(rate) for rate in np.geomspace(start, end, steps)]


def suggest(rates: Sequence[float], losses: Sequence[float], *, smoothing: float = 0.05) -> float:
    """Learning rate at which the smoothed loss falls fastest.

    The slope is d loss / d log(rate), up to the minimum of the loss. Smoothing uses a Gaussian
    centered on each point, so it does not move the curve to higher rates.

    Args:
        losses: training loss of each step; ignored from the first one that is not finite.
        smoothing: standard deviation of the Gaussian, as a share of the sweep.

    Raises:
        UserError: there are too few steps, or the loss does not fall.
    """
    finite = np.isfinite(np.asarray(losses, dtype=np.float64))
    count = len(losses) if finite.all() else int(np.argmin(finite))
    if count < FEWEST:
        raise UserError(
            f"learning-rate finder: {count} finite losses before training diverged; {FEWEST} or "
            "more are needed: start lower or take more steps"
        )
    logs = np.log(np.asarray(rates[:count], dtype=np.float64))
    smooth = _smooth(np.asarray(losses[:count], dtype=np.float64), smoothing * len(losses))
    lowest = int(np.argmin(smooth))
    if lowest == 0:
        raise UserError(
            f"learning-rate finder: the loss does not decrease between {rates[0]:g} and "
            f"{rates[count - 1]:g}; start lower"
        )
    slopes = np.gradient(smooth, logs)[: lowest + 1]
    return float(rates[int(np.argmin(slopes))])


def _smooth(values: Floats, width: float) -> Floats:
    """Smooth values with a Gaussian of standard deviation `width`, truncated at the ends.

    Values are clipped to twice the first losses; otherwise, exploding losses at the end of a sweep
    would affect earlier points.
    """
    values = np.minimum(values, 2 * np.median(values[: max(1, len(values) // 10)]))
    steps = np.arange(len(values))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / max(width, 1e-9)) ** 2)
    smooth: Floats = weights @ values / weights.sum(axis=1)
    return smooth
