"""How a run computes on a device: precision and deterministic algorithms."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from tokamake.config.resolved_run import Run
from tokamake.config.training import TrainSettings

Precision = Literal["fp32", "bf16", "fp16"]


def choose_precision(train: TrainSettings, device: torch.device) -> Precision:
    """Dtype of forward and backward passes: the setting, or the device's default."""
    if train.precision is not None:
        return train.precision
    return "fp32" if device.type == "cpu" else "bf16"


def with_precision(run: Run, device: torch.device) -> Run:
    """The run with its precision filled in, which may depend on the device.

    Called once, before ranks check the run. All other code reads `precision_of`.
    """
    train = run.train.model_copy(update={"precision": choose_precision(run.train, device)})
    return run.model_copy(update={"train": train})


def precision_of(run: Run) -> Precision:
    """Precision of a run that `with_precision` has returned."""
    assert run.train.precision is not None, "with_precision comes first"
    return run.train.precision


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Use deterministic algorithms of torch only; operations without one raise RuntimeError."""
    if not enabled:
        yield
        return
    # cuBLAS reads this once, at its first call.
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
