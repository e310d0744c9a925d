"""What a back end tells the loop of a step, and of a checkpoint that is being written."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple


class StepResult(NamedTuple):
    """A training step, alike on all ranks."""

    loss: float
    """Mean over the tokens of the global batch, before the step."""
    grad_norm: float
    """Norm of its gradient, before clipping."""
    stop: bool
    """Whether any rank was asked to stop."""
    saved: bool
    """Whether all ranks have finished what they had to save."""
    skipped: bool
    """Whether there was no update, since gradients in fp16 were too large for it."""


class Saving:
    """A checkpoint that is being written.

    Args:
        written: ends when this rank's files are written; None: they are.
        finish: what is left to do then; all ranks call it.
    """

    def __init__(
        self, written: "Future[Any] | None" = None, finish: Callable[[], None] = lambda: None
    ) -> None:
        self._written, self._finish = written, finish

    @property
    def done(self) -> bool:
        """Whether this rank's files are written."""
        return self._written is None or self._written.done()

    def wait(self) -> None:
        """Wait until the files are on disk; raises what kept them from it."""
        if self._written is not None:
            self._written.result()
        self._finish()
