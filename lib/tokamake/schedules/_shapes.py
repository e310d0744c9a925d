"""How a rate goes from one share of the peak to another; schedules put their phases together."""

import math


def between(shape: str, progress: float, *, start: float, end: float) -> float:
    """Share of the peak once part of a phase, `progress` of 0 to 1, is done.

    With p for it and s, e for start and end:
    linear: s + (e - s) p;
    cosine: e + (s - e) (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017, arXiv 1608.03983);
    1-sqrt: e + (s - e) (1 - sqrt(p)) (Hägele et al. 2024, arXiv 2405.18392);
    exponential: s (e / s)^p (Ibrahim et al. 2024, arXiv 2403.08763).
    """
    progress = min(1.0, max(0.0, progress))
    if shape == "exponential":
        return start * (end / start) ** progress
    left = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "1-sqrt": 1.0 - math.sqrt(progress),
    }[shape]
    return end + (start - end) * left
