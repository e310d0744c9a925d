"""Warm-up, then half a cosine wave from the peak learning rate to its last share."""

import math


def factor(step: int, *, warmup_steps: int, train_steps: int, min_ratio: float) -> float:
    """Share of the peak learning rate for the update after `step` finished updates.

    With progress p = (step - warmup_steps) / (train_steps - warmup_steps), kept within 0..1:
    step / warmup_steps while step < warmup_steps, then
    min_ratio + (1 - min_ratio) (1 + cos(pi p)) / 2
    (Loshchilov & Hutter 2017, arXiv 1608.03983, equation 5, without restarts).
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, train_steps - warmup_steps))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
