"""Warm-up, then the peak learning rate to the end."""


def factor(step: int, *, warmup_steps: int, **_unused: float) -> float:
    """Share of the peak learning rate for the update after `step` finished updates.

    step / warmup_steps while step < warmup_steps (Goyal et al. 2017, arXiv 1706.02677), then 1.
    `train_steps` and `min_ratio`, which other schedules know, have no meaning here.
    """
    return step / warmup_steps if step < warmup_steps else 1.0
