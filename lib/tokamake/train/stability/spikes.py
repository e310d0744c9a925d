"""Find the fault of a step: a loss or gradient norm that is not finite, or a spike.

Both are sums over all ranks, so that all ranks decide alike without another collective.
"""

import math
from collections.abc import Sequence
from statistics import median
from sys import float_info

from tokamake.config.train_sections import BadStepSettings
from tokamake.train.bad_steps import BadStep

_NORMAL = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""
_LEAST_SPREAD = 1e-3
"""Share of the median that counts as spread at least: equal values make no change a spike."""


def find_fault(
    settings: BadStepSettings,
    recent: Sequence[tuple[float, float]],
    *,
    loss: float,
    grad_norm: float,
) -> BadStep | None:
    """Compare with the `recent` losses and gradient norms (before clipping) of good steps."""
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            return BadStep("not_finite", settings.not_finite, f"{name}: {value}")
    if settings.spike == "ignore" or len(recent) < settings.spike_window:
        return None
    losses, norms = zip(*recent, strict=True)
    for name, value, earlier in (("loss", loss, losses), ("gradient norm", grad_norm, norms)):
        if (score := robust_score(value, earlier)) > settings.spike_threshold:
            reason = (
                f"{name}: {value:.4g}, {score:.1f} robust standard deviations above the median "
                f"{median(earlier):.4g} of the last {len(earlier)} good steps"
            )
            return BadStep("spike", settings.spike, reason)
    return None


def robust_score(value: float, earlier: Sequence[float]) -> float:
    """Distance of a value above the median of earlier ones, in robust standard deviations.

    Outliers among the earlier values change neither the median nor the median absolute deviation
    much (Iglewicz and Hoaglin 1993). A value below the median has a negative score.
    """
    center = median(earlier)
    spread = _NORMAL * median(abs(each - center) for each in earlier)
    return (value - center) / max(spread, _LEAST_SPREAD * abs(center), float_info.min)
