"""Hooks of a training loop: they watch and record a run, and decide none of its steps.

The loop calls them on all ranks, in the order of its list `hooks`.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # `tokamake status` imports a hook, without torch
    from tokamake.checkpoint.native.resume_state import ResumeState
    from tokamake.train.metrics import Validation
    from tokamake.train.step_result import StepResult


class FinishedStep(NamedTuple):
    """A step that has ended."""

    state: "ResumeState"
    """State of the run after the step."""
    result: "StepResult"
    """Measurements; `NOTHING` if its data are left out."""
    learning_rate: float
    next_rate: float
    """Learning rate of the next step."""
    num_samples: int
    """Samples of all ranks."""
    seconds: float
    """Time of the step; 0 if its data are left out."""
    reading: float
    """Part of it in which this rank waited for its samples."""
    is_logged: bool
    """Whether a record of the steps since the last record is due."""


class Hook:
    """Base class of hooks; each method does nothing by default."""

    def begin_step(self, step: int) -> None:
        """Called before the samples of a step are read."""

    def end_step(self, finished: FinishedStep) -> None:
        """Called after the update of a step."""

    def validated(self, state: "ResumeState", measured: dict[str, "Validation"]) -> None:
        """Called with the measurements of each validation split."""

    def sync(self) -> None:
        """Bring records to disk: called before a checkpoint is saved, and after the last step."""

    def close(self) -> None:
        """Called when the loop ends, also by an error, or goes back to a checkpoint."""
