"""Warm-up, stable, decay, also called trapezoid: the peak learning rate until a cooldown."""

from tokamake.schedules._shapes import between

SETTINGS = {
    "warmup_steps": 0,
    "cooldown_fraction": 0.2,
    "cooldown_shape": "1-sqrt",
    "min_ratio": 0.0,
}


def factor(
    position: float,
    *,
    warmup: float,
    length: float,
    cooldown: float,
    cooldown_shape: str,
    min_ratio: float,
) -> float:
    """Share of the peak learning rate after warm-up.

    1 until length - cooldown, then down to min_ratio at the end of the run (Hu et al. 2024,
    arXiv 2404.06395; cooldown by 1 - sqrt as Hägele et al. 2024, arXiv 2405.18392).

    Args:
        position: what the run has done, in the unit of the lengths.
        warmup: length of warm-up.
        length: of the run.
        cooldown: length of the last phase.
        cooldown_shape: how the rate falls in it, as `between` knows.
        min_ratio: share of the peak at the end.
    """
    done = position - (length - cooldown)
    if done <= 0:
        return 1.0
    return between(cooldown_shape, done / cooldown if cooldown else 1.0, start=1.0, end=min_ratio)
