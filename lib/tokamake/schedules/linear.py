"""Linear decay from the peak learning rate to a minimum."""

SETTINGS = {"warmup_steps": 0, "decay_fraction": 1.0, "min_ratio": 0.1}


def factor(
    position: float, *, warmup: float, length: float, decay: float, min_ratio: float
) -> float:
    """Share of the peak learning rate after warm-up; `decay` is the position where it ends.

    With progress p = (position - warmup) / (decay - warmup), at most 1:
    1 - (1 - min_ratio) p (Devlin et al. 2019, arXiv 1810.04805, where min_ratio is 0).
    """
    progress = min(1.0, (position - warmup) / max(1, decay - warmup))
    return 1.0 - (1.0 - min_ratio) * progress
