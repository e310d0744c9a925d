"""Warm-up, then a straight line from the peak learning rate to its last share."""


def factor(step: int, *, warmup_steps: int, train_steps: int, min_ratio: float) -> float:
    """Share of the peak learning rate for the update after `step` finished updates.

    With progress p = (step - warmup_steps) / (train_steps - warmup_steps), kept within 0..1:
    step / warmup_steps while step < warmup_steps, then 1 - (1 - min_ratio) p
    (Devlin et al. 2019, arXiv 1810.04805, where min_ratio is 0).
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, train_steps - warmup_steps))
    return 1.0 - (1.0 - min_ratio) * progress
