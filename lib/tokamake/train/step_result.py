"""Values that a back end returns to the trainer: a step's result, a checkpoint being written."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint import CheckpointException

from tokamake.errors import UserError
from tokamake.models.common.router_losses import LayerRouting
from tokamake.train.bad_steps import BadStep

FindFault = Callable[[float, float], BadStep | None]
"""Checks a step by its loss and gradient norm; the same on all ranks."""


class StepResult(NamedTuple):
    """A training step; the same on all ranks."""

    loss: float
    """Mean over the tokens of the global batch, before the update."""
    grad_norm: float
    """Norm of the gradient, before clipping."""
    stop: bool
    """Whether any rank was asked to stop."""
    saved: bool
    """Whether all ranks have written their files of the checkpoint that is being saved."""
    skipped: bool
    """Whether there was no update because gradients overflowed in fp16."""
    loss_scale: float = 1.0
    """Loss scale of the step; 1 in other precisions than fp16."""
    bad: BadStep | None = None
    """Fault of the step; None: it is good."""
    updated: bool = True
    """Whether the step updated the weights."""
    layer_norms: tuple[float, ...] = ()
    """Norm of the gradient of each layer, then of all other parameters; empty: not measured."""
    corpus_losses: tuple[tuple[float, float], ...] = ()
    """Sum of the losses in nats, and number of tokens, of each corpus; empty: not measured."""
    sample_loss: float | None = None
    """Part of `loss`: mean over the samples of the loss of their classes, such as the order of
    sentences; None: they have none."""
    has_labels: bool = True
    """Whether any token, or sample, of the global batch has a label; else the loss is 0."""
    routers: tuple[LayerRouting, ...] = ()
    """Measurements of the router of each layer; empty: the family has none."""
    further_losses: tuple[float, ...] = ()
    """Mean loss of each layer that predicts further tokens, not part of `loss`; empty: the model
    has none."""
    num_rows: int = 0
    """Rows of tokens, over all ranks: fewer than samples if these share rows."""


NO_RESULT = StepResult(math.nan, math.nan, stop=False, saved=False, skipped=False, updated=False)
"""Result of a step whose data are left out."""


def accept(loss: float, grad_norm: float) -> None:
    """Find no fault: for steps on trial, which are not part of a run."""


class Saving:
    """A checkpoint that is being written.

    Args:
        written: future that ends when the files of all ranks are written and synced; `commit`
            syncs the folder.
    """

    def __init__(self, folder: Path, written: "Future[Any]") -> None:
        self._folder, self._written = folder, written

    @property
    def done(self) -> bool:
        """Whether this rank's files are written."""
        return self._written.done()

    def wait(self) -> None:
        """Wait until the files are on disk."""
        try:
            self._written.result()
        except CheckpointException as error:
            reasons = {
                str(exception).partition("\n")[0] for exception, _ in error.failures.values()
            }
            raise UserError(
                f"{self._folder}: could not be written ({'; '.join(sorted(reasons))}); make "
                "room or fix the disk, and rerun: the checkpoint before it is complete"
            ) from None
