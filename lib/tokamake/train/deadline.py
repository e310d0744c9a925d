"""When the job that trains will be killed, so that it saves and ends before.

The scheduler tells the time; how much of it a step and a checkpoint take is measured.
"""

import os
import subprocess
import time
from collections.abc import Callable

from tokamake.batch_systems import seconds_of

_WORST_MARGIN = 300.0
_MARGIN = 0.1
"""What is kept for the end in any case: this share of the time left at the start, 5 min at most."""
_ANSWER_SECONDS = 20


class Deadline:
    """The end of a job, and what must be done before it.

    Args:
        end: time.time() at which the job is killed; None: it may run for ever.
        clock: gives the time.
    """

    def __init__(self, end: float | None, clock: Callable[[], float] = time.time) -> None:
        self.end, self._clock = end, clock
        self._margin = min(_MARGIN * max(end - clock(), 0), _WORST_MARGIN) if end else 0.0
        self._asked: float | None = None
        self._step = 0.0
        self._saving_since = 0.0
        self._saving: float | None = None

    def near(self) -> bool:
        """Whether to stop after the next step; ask before each.

        There must be time for two steps as long as the longest so far, with what lies between them,
        for two checkpoints as slow as the slowest, and a margin.
        """
        if self.end is None:
            return False
        now = self._clock()
        if self._asked is not None:
            self._step = max(self._step, now - self._asked)
        self._asked = now
        saving = self._margin if self._saving is None else 2 * self._saving
        return now + 2 * self._step + saving + self._margin > self.end

    def begin_saving(self) -> None:
        """Note that a checkpoint begins to be written."""
        self._saving_since = self._clock()

    def end_saving(self) -> None:
        """Note that it is on disk."""
        self._saving = max(self._saving or 0.0, self._clock() - self._saving_since)


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
