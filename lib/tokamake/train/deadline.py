"""When the job that trains will be killed, so that it saves and ends before.

The scheduler tells the time; how much of it a step and a checkpoint take is measured, by this job
and by the one before it in the same output folder.
"""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokamake import files
from tokamake.batch_systems import seconds_of
from tokamake.errors import UserError

_WORST_MARGIN = 300.0
_MARGIN = 0.1
"""What is kept for the end in any case: this share of the time left at the start, 5 min at most."""
_ANSWER_SECONDS = 20
DURATIONS = "durations.json"
"""File in the output folder that says how long things took in the job that saved last."""


class Durations(NamedTuple):
    """How long things took in a job at the worst, in seconds."""

    step: float = 0.0
    """A step, with what lies between it and the next: a validation, the begin of a checkpoint."""
    checkpoint: float = 0.0
    """A checkpoint, until it is on disk; 0: none was written."""


class Deadline:
    """The end of a job, and what must be done before it.

    Args:
        end: time.time() at which the job is killed; None: it may run for ever.
        clock: gives the time.
        earlier: what an earlier job of the run has measured.
    """

    def __init__(
        self,
        end: float | None,
        clock: Callable[[], float] = time.time,
        *,
        earlier: Durations = Durations(),  # noqa: B008
    ) -> None:
        self.end, self._clock, self._earlier = end, clock, earlier
        self._margin = min(_MARGIN * max(end - clock(), 0), _WORST_MARGIN) if end else 0.0
        self._asked: float | None = None
        self._saving_since = 0.0
        self.measured = Durations()

    def near(self) -> bool:
        """Whether to stop after the next step; ask before each.

        There must be time for two steps as long as the longest so far, with what lies between them,
        for two checkpoints as slow as the slowest, and a margin.
        """
        now, before = self._clock(), self._asked
        self._asked = now
        if before is not None:
            step = max(self.measured.step, now - before)
            self.measured = self.measured._replace(step=step)
        if self.end is None:
            return False
        step = max(self.measured.step, self._earlier.step)
        checkpoint = max(self.measured.checkpoint, self._earlier.checkpoint)
        return now + 2 * step + (2 * checkpoint or self._margin) + self._margin > self.end

    def begin_saving(self) -> None:
        """Note that a checkpoint begins to be written."""
        self._saving_since = self._clock()

    def end_saving(self) -> None:
        """Note that it is on disk."""
        checkpoint = max(self.measured.checkpoint, self._clock() - self._saving_since)
        self.measured = self.measured._replace(checkpoint=checkpoint)


def read_durations(path: Path, world_size: int) -> Durations:
    """What the job before has written down; nothing, if it had other ranks or the file is damaged.

    Args:
        path: its file.
        world_size: ranks of this job.
    """
    try:
        found = files.read_json(path, "")
        if found["world_size"] == world_size:
            return Durations(float(found["step_seconds"]), float(found["checkpoint_seconds"]))
    except (UserError, OSError, KeyError, TypeError, ValueError):
        pass
    return Durations()


def write_durations(path: Path, world_size: int, measured: Durations) -> None:
    """Write down what a job has measured, for the next one.

    What jobs before it measured is not kept: a bad day of a file system would slow all to come.
    """
    seconds = {"step_seconds": measured.step, "checkpoint_seconds": measured.checkpoint}
    files.write_json(path, {"world_size": world_size, **seconds})


def end_of_job(minutes: float | None = None) -> float | None:
    """When this job will be killed, as time.time(); None: nothing says so.

    Slurm says it in SLURM_JOB_END_TIME, older versions to who asks squeue; a job of
    snakemake-executor-plugin-pbs has it in PBS_JOB_END_TIME.

    Args:
        minutes: how long it may run from now, which goes before what the scheduler says.
    """
    if minutes is not None:
        return time.time() + 60 * minutes
    for name in ("SLURM_JOB_END_TIME", "PBS_JOB_END_TIME"):
        value = os.environ.get(name, "")
        if value.isdecimal() and float(value) > time.time():  # else it is that of an earlier job
            return float(value)
    left = _slurm_seconds_left(job) if (job := os.environ.get("SLURM_JOB_ID")) else None
    return None if left is None else time.time() + left


def _slurm_seconds_left(job: str) -> float | None:
    command = ["squeue", "--noheader", "--format=%L", f"--jobs={job}"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return seconds_of(answer.strip())
