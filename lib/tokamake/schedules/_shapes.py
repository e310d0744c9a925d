"""Shapes of the phases of schedules: curves from one share of the peak to another."""

import math


def between(shape: str, progress: float, *, start: float, end: float) -> float:
    """Share of the peak within a phase, from `start` to `end`.

    `progress` is clipped to 0..1. With p for progress, s for start and e for end:
    linear: s + (e - s) p;
    cosine: e + (s - e) (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017, arXiv 1608.03983);
    1-sqrt: e + (s - e) (1 - sqrt(p)) (Hägele et al. 2024, arXiv 2405.18392);
    exponential: s (e / s)^p (Ibrahim et al. 2024, arXiv 2403.08763).
    """
    progress = min(1.0, max(0.0, progress))
    if shape == "exponential":
        return start * (end / start) ** progress
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "1-sqrt": 1.0 - math.sqrt(progress),
    }[shape]
    return end + (start - end) * remaining
