"""Constant learning rate after warm-up."""

from typing import Any

SETTINGS: dict[str, Any] = {"warmup_steps": 0}


def factor(position: float, *, warmup: float, length: float) -> float:
    """Share of the peak learning rate after warm-up: 1 (Goyal et al. 2017, arXiv 1706.02677)."""
    return 1.0
