"""A note of how far training has come, for the executors that submit jobs.

The executors for PBS and Slurm name a file in JOB_PROGRESS_FILE. If a job fails and the file's last
line is new, they submit the job again instead of reporting a failure.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokamake.errors import UserError
from tokamake.runtime.ranks import Ranks

_VARIABLE = "JOB_PROGRESS_FILE"


def note(step: int) -> None:
    """Write that a checkpoint is saved at a step; do nothing outside an executor's job."""
    if path := os.environ.get(_VARIABLE):
        with suppress(OSError):  # training is worth more than the note
            Path(path).write_text(f"saved at step {step}\n")


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
