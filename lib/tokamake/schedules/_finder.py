"""Learning-rate finder: a sweep of rates that grow exponentially, and what its losses suggest.

Smith 2015, arXiv 1506.01186, section 3.3, with the point of steepest descent as fastai takes it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokamake.errors import UserError

FEWEST = 10
"""Steps whose losses say anything."""

Floats = npt.NDArray[np.float64]


def sweep(start: float, end: float, steps: int) -> list[float]:
    """Learning rate of each step of the sweep, from `start` to `end` by equal factors."""
    return [float(rate) for rate in np.geomspace(start, end, steps)]


def suggest(rates: Sequence[float], losses: Sequence[float], *, smoothing: float = 0.05) -> float:
    """Learning rate at which the smoothed loss falls fastest.

    The slope is that against the logarithm of the rate, before the loss is lowest. Smoothing is
    by a Gaussian around each point, so that it does not move the curve to higher rates.

    Args:
        rates: learning rate of each step, growing.
        losses: training loss of each step; what follows one that is not finite does not count.
        smoothing: width (standard deviation) of the Gaussian, as a share of the sweep.

    Raises:
        UserError: too few steps, or the loss does not fall.
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
            f"learning-rate finder: the loss falls nowhere from {rates[0]:g} to "
            f"{rates[count - 1]:g}; start lower"
        )
    slopes = np.gradient(smooth, logs)[: lowest + 1]
    return float(rates[int(np.argmin(slopes))])


def _smooth(values: Floats, width: float) -> Floats:
    """Weighted means around each value, of those there are near the ends.

    What explodes at the end of a sweep is cut to twice the first losses, or it would reach back.
    """
    values = np.minimum(values, 2 * np.median(values[: max(1, len(values) // 10)]))
    places = np.arange(len(values))
    weights = np.exp(-0.5 * ((places[:, None] - places) / max(width, 1e-9)) ** 2)
    found: Floats = weights @ values / weights.sum(axis=1)
    return found
