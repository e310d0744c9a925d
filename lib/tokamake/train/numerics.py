"""How a run computes on a device: number format of its passes, and whether all is repeatable.

Settings and device in; `loop` and the back ends ask here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from tokamake.config.resolved_run import Run
from tokamake.config.training import TrainSettings

Precision = Literal["fp32", "bf16", "fp16"]


def precision_of(train: TrainSettings, device: torch.device) -> Precision:
    """Number format of forward and backward passes: what is asked for, or the device's usual."""
    if train.precision is not None:
        return train.precision
    return "fp32" if device.type == "cpu" else "bf16"


def decided(run: Run, device: torch.device) -> Run:
    """The run with what it leaves to the device written down."""
    train = run.train.model_copy(update={"precision": precision_of(run.train, device)})
    return run.model_copy(update={"train": train})


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Let torch take deterministic algorithms alone; where there is none, it raises.

    Args:
        wanted: whether to do so; else nothing changes.
    """
    if not wanted:
        yield
        return
    # Read by cuBLAS once, at its first call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
