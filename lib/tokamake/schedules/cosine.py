"""Half a cosine wave from the peak learning rate to its last share."""

import math

SETTINGS = {"warmup_steps": 0, "decay_fraction": 1.0, "min_ratio": 0.1}


def factor(
    position: float, *, warmup: float, length: float, decay: float, min_ratio: float
) -> float:
    """Share of the peak learning rate after warm-up.

    With progress p = (position - warmup) / (decay - warmup), kept within 0..1:
    min_ratio + (1 - min_ratio) (1 + cos(pi p)) / 2
    (Loshchilov & Hutter 2017, arXiv 1608.03983, equation 5, without restarts).

    Args:
        position: what the run has done, in the unit of the lengths.
        warmup: length of warm-up.
        length: of the run.
        decay: position where the rate is lowest.
        min_ratio: share of the peak from there on.
    """
    progress = min(1.0, (position - warmup) / max(1, decay - warmup))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
