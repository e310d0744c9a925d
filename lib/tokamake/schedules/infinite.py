"""Cooldown, constant phase, annealing: a run can continue from its constant phase with new data."""

from tokamake.schedules._schedule import between

SETTINGS = {
    "warmup_steps": 0,
    "cooldown_fraction": 0.6,
    "cooldown_shape": "cosine",
    "constant_ratio": 0.55,
    "annealing_fraction": 0.15,
    "annealing_shape": "exponential",
    "min_ratio": 0.1,
}


def factor(
    position: float,
    *,
    warmup: float,
    length: float,
    cooldown: float,
    annealing: float,
    **levels: float | str,
) -> float:
    """Share of the peak rate after warm-up, `cooldown`, a constant phase and `annealing`.

    Ibrahim et al. 2024, arXiv 2403.08763, section 7: after warm-up, the cooldown lowers the share
    from 1 to constant_ratio; it stays constant until length - annealing; annealing lowers it to
    min_ratio at the end of the run.

    Args:
        levels: constant_ratio and min_ratio, shares of the peak; cooldown_shape and
            annealing_shape, shapes of `between`.
    """
    constant = float(levels["constant_ratio"])
    annealed = position - (length - annealing)
    if annealed > 0:
        progress = annealed / annealing if annealing else 1.0
        shape, end = str(levels["annealing_shape"]), float(levels["min_ratio"])
        return between(shape, progress, start=constant, end=end)
    progress = (position - warmup) / cooldown if cooldown else 1.0
    return between(str(levels["cooldown_shape"]), progress, start=1.0, end=constant)
