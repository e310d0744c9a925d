"""Warm-up, cooldown, constant, annealing: a run can go on from its constant phase with new data."""

from tokamake.schedules._shapes import between

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
    """Share of the peak learning rate after warm-up.

    Ibrahim et al. 2024, arXiv 2403.08763, section 7: from 1 to constant_ratio over the cooldown,
    which follows warm-up, constant until length - annealing, then to min_ratio at the end.

    Args:
        position: what the run has done, in the unit of the lengths.
        warmup: length of warm-up.
        length: of the run.
        cooldown: length of the phase after warm-up.
        annealing: length of the last phase.
        levels: constant_ratio and min_ratio, shares of the peak; cooldown_shape and
            annealing_shape, as `between` knows them.
    """
    constant = float(levels["constant_ratio"])
    done = position - (length - annealing)
    if done > 0:
        progress = done / annealing if annealing else 1.0
        shape, end = str(levels["annealing_shape"]), float(levels["min_ratio"])
        return between(shape, progress, start=constant, end=end)
    progress = (position - warmup) / cooldown if cooldown else 1.0
    return between(str(levels["cooldown_shape"]), progress, start=1.0, end=constant)
