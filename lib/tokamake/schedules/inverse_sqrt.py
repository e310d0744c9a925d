"""Inverse square root decay, which does not depend on the length of the run."""

SETTINGS = {"warmup_steps": 0, "min_ratio": 0.0}


def factor(position: float, *, warmup: float, length: float, min_ratio: float) -> float:
    """Share of the peak learning rate after warm-up.

    max(min_ratio, sqrt(warmup / position)) (Vaswani et al. 2017, arXiv 1706.03762, equation 3; the
    minimum is Megatron's). Without warm-up, warmup counts as 1.
    """
    share: float = (max(warmup, 1) / max(position, 1)) ** 0.5
    return max(min_ratio, min(1.0, share))
