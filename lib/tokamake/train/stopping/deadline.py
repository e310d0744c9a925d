"""The time at which the scheduler kills this job; training saves and ends before.

The scheduler states the time. How long a step and a checkpoint take is measured: by this job, and
by the previous job of the same run.
"""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokamake import files
from tokamake.errors import UserError
from tokamake.runtime.ranks import Ranks
from tokamake.scheduler_formats import seconds_of

_MARGIN = 0.1
"""Share of the time at the start of the job that is kept for its end."""
_MAX_MARGIN_SECONDS = 300.0
_ANSWER_SECONDS = 20
"""How long squeue may take to answer."""
DURATIONS = "durations.json"
"""File in the output folder: how long things took in the last job that saved."""


class Durations(NamedTuple):
    """Longest times that a job has measured, in seconds."""

    step: float = 0.0
    """From one step to the next, including a validation or the begin of a checkpoint."""
    checkpoint: float = 0.0
    """A checkpoint, until it is on disk; 0: none was written."""


class Deadline:
    """The end of a job, and the work that must end before it.

    Args:
        end: time.time() at which the job is killed; None: it has no time limit.
        earlier: times that the previous job of the run has measured.
    """

    def __init__(
        self,
        end: float | None,
        clock: Callable[[], float] = time.time,
        *,
        earlier: Durations = Durations(),  # noqa: B008
    ) -> None:
        self.end, self._clock, self._earlier = end, clock, earlier
        self._margin = min(_MARGIN * max(end - clock(), 0), _MAX_MARGIN_SECONDS) if end else 0.0
        self._last_call: float | None = None
        self._saving_since = 0.0
        self.measured = Durations()

    @classmethod
    def of_job(cls, output: Path, ranks: Ranks, *, minutes: float | None) -> "Deadline":
        """Deadline in `minutes`, or by the scheduler; rank 0 reads it and sends it to all ranks."""
        end = end_of_job(minutes) if ranks.rank == 0 else None
        if end:
            ranks.print_once(f"this job ends at {time.ctime(end)}; training saves before")
        return cls(end, earlier=read_durations(output / DURATIONS, ranks.world_size))

    def near(self) -> bool:
        """Whether to stop after the next step; call it before each step.

        There must be time for two steps as long as the longest so far, for two checkpoints as slow
        as the slowest, and for the margin.
        """
        now, last_call = self._clock(), self._last_call
        self._last_call = now
        if last_call is not None:
            step = max(self.measured.step, now - last_call)
            self.measured = self.measured._replace(step=step)
        if self.end is None:
            return False
        step = max(self.measured.step, self._earlier.step)
        checkpoint = max(self.measured.checkpoint, self._earlier.checkpoint)
        return now + 2 * step + (2 * checkpoint or self._margin) + self._margin > self.end

    def begin_saving(self) -> None:
        self._saving_since = self._clock()

    def end_saving(self) -> None:
        checkpoint = max(self.measured.checkpoint, self._clock() - self._saving_since)
        self.measured = self.measured._replace(checkpoint=checkpoint)


def read_durations(path: Path, world_size: int) -> Durations:
    """Read the previous job's durations; zeros if it had another number of ranks.

    A missing or damaged file gives zeros, too.
    """
    try:
        content = files.read_json(path, "")
        if content["world_size"] == world_size:
            return Durations(float(content["step_seconds"]), float(content["checkpoint_seconds"]))
    except (UserError, OSError, KeyError, TypeError, ValueError):
        pass
    return Durations()


def write_durations(path: Path, world_size: int, *, measured: Durations) -> None:
    """Write this job's durations for the next job.

    Replaces the times of earlier jobs: one slow day of a file system must not slow all later jobs.
    """
    seconds = {"step_seconds": measured.step, "checkpoint_seconds": measured.checkpoint}
    files.write_json(path, {"world_size": world_size, **seconds})


def end_of_job(minutes: float | None = None) -> float | None:
    """time.time() at which this job is killed: in `minutes`, else by the scheduler; or None.

    Slurm sets SLURM_JOB_END_TIME; older versions do not, but squeue knows the time left. A job of
    snakemake-executor-plugin-pbs has PBS_JOB_END_TIME.
    """
    if minutes is not None:
        return time.time() + 60 * minutes
    for name in ("SLURM_JOB_END_TIME", "PBS_JOB_END_TIME"):
        value = os.environ.get(name, "")
        # A time in the past was inherited from an earlier job.
        if value.isdecimal() and float(value) > time.time():
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
