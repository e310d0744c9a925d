"""Cosine decay from the peak learning rate to a minimum."""

import math

SETTINGS = {"warmup_steps": 0, "decay_fraction": 1.0, "min_ratio": 0.1}


def factor(
    position: float, *, warmup: float, length: float, decay: float, min_ratio: float
) -> float:
    """Share of the peak learning rate after warm-up; `decay` is the position where it ends.

    With progress p = (position - warmup) / (decay - warmup), at most 1:
    min_ratio + (1 - min_ratio) (1 + cos(pi p)) / 2
    (Loshchilov & Hutter 2017, arXiv 1608.03983, equation 5, without restarts).
    """
    progress = min(1.0, (position - warmup) / max(1, decay - warmup))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
