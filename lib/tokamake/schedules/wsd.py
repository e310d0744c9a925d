"""Warmup-stable-decay (trapezoid): the peak learning rate until a cooldown."""

from tokamake.schedules._schedule import between

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
    arXiv 2404.06395; the 1-sqrt shape: Hägele et al. 2024, arXiv 2405.18392).
    """
    cooled = position - (length - cooldown)
    if cooled <= 0:
        return 1.0
    progress = cooled / cooldown if cooldown else 1.0
    return between(cooldown_shape, progress, start=1.0, end=min_ratio)
