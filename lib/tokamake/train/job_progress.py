"""Notes how far training has come, so that a job that is cut off goes on in a new one.

The executors for PBS and Slurm name a file in JOB_PROGRESS_FILE. If a job fails and its last line
there is a new one, they submit the job again instead of reporting a failure.
"""

import os
from contextlib import suppress
from pathlib import Path

_VARIABLE = "JOB_PROGRESS_FILE"


def note(step: int) -> None:
    """Note that a checkpoint is saved at a step; outside a job of an executor, do nothing."""
    if path := os.environ.get(_VARIABLE):
        with suppress(OSError):  # a note is no reason to end a training
            Path(path).write_text(f"saved at step {step}\n")


def retract() -> None:
    """Remove the note: training again would fail in the same way."""
    if path := os.environ.get(_VARIABLE):
        with suppress(OSError):
            Path(path).unlink()
