"""The peak learning rate over the root of progress, which needs no end of the run."""

SETTINGS = {"warmup_steps": 0, "min_ratio": 0.0}


def factor(position: float, *, warmup: float, length: float, min_ratio: float) -> float:
    """Share of the peak learning rate after warm-up.

    sqrt(warmup / position), but min_ratio at least (Vaswani et al. 2017, arXiv 1706.03762,
    equation 3, and Megatron's floor); without warm-up as with one of length 1.

    Args:
        position: what the run has done, in the unit of the lengths.
        warmup: length of warm-up.
        length: of the run.
        min_ratio: least share of the peak.
    """
    share: float = (max(warmup, 1) / max(position, 1)) ** 0.5
    return max(min_ratio, min(1.0, share))
