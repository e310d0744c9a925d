"""A note of how far training has come, for the executors that submit jobs.

The executors for PBS and Slurm name a file in JOB_PROGRESS_FILE. If a job fails and the file's last
line is new, they submit the job again instead of reporting a failure.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.errors import UserError
from tokamake.runtime.exit_status import Stopped
from tokamake.runtime.ranks import Ranks
from tokamake.train.hooks import Hook, Training
from tokamake.train.stopping.stopping import describe

_VARIABLE = "JOB_PROGRESS_FILE"


class JobProgress(Hook):
    """Notes each checkpoint."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def saved(self, state: ResumeState) -> None:
        if self._rank == 0:
            note(state.step)


def open_hook(training: Training) -> Hook:
    return JobProgress(training.ranks.rank)


def note(step: int, *, stopped: str = "") -> None:
    """Note, in an executor's job, the step of a checkpoint and how training `stopped` in time."""
    if path := os.environ.get(_VARIABLE):
        with suppress(OSError):  # training is worth more than the note
            Path(path).write_text(f"{stopped and f'stopped {stopped}, '}saved at step {step}\n")


def say_stopped(reason: Stopped, step: int, *, ranks: Ranks) -> None:
    """Print why training stopped and how it continues; note it if that was planned."""
    in_time = reason is Stopped.TIME and bool(os.environ.get(_VARIABLE))
    if in_time and ranks.rank == 0:
        note(step, stopped=describe(reason))
    remedy = "the next job continues" if in_time else "run the same command again to continue"
    ranks.print_once(f"stopped {describe(reason)}: saved at step {step}, {remedy}")


@contextmanager
def retracted_on_error(ranks: Ranks) -> Iterator[None]:
    """Remove the note on a `UserError`: a new job would fail in the same way."""
    try:
        yield
    except UserError:
        path = os.environ.get(_VARIABLE)
        if path and ranks.rank == 0:
            with suppress(OSError):
                Path(path).unlink()
        raise
