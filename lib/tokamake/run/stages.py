"""Stages of a workflow that runs: jobs, and how many of them are done.

A stage is a rule, or a rule of one run. Events are records that the logger plug-in makes from
Snakemake's, see `snakemake_logger_plugin_tokamake`.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokamake.data.indexed.job_batch import written

Event = dict[str, Any]
_REASON_OF_OTHERS = "Input files updated by another job"
"""Says only that an earlier job of the same start runs."""


@dataclass
class StartedJob:
    """A job that has begun."""

    number: int
    rule: str
    run: str
    """Empty: it belongs to no run."""
    outputs: list[str]
    logs: list[str]
    reasons: list[str]
    """Why Snakemake runs it, without names of files."""


@dataclass
class Stage:
    """Jobs of a rule, or of a rule and a run."""

    rule: str
    run: str
    total: int
    """Jobs that are planned."""
    started: float
    """Seconds of a monotonic clock."""
    running: dict[int, StartedJob] = field(default_factory=dict)
    done: int = 0
    failed: int = 0
    ended: float | None = None
    """Seconds of the same clock, when its last job ended."""
    documents: int = 0
    """Documents and tokens in the datasets that its finished jobs have written."""
    tokens: int = 0
    bytes: int = 0
    """Size of these datasets."""

    @property
    def name(self) -> str:
        return f"{self.rule} {self.run}".strip()

    @property
    def is_done(self) -> bool:
        return self.done >= self.total

    def seconds(self) -> float:
        """Seconds since it began, until it ended."""
        return (self.ended or time.monotonic()) - self.started

    def seconds_left(self) -> float | None:
        """Remaining seconds at the speed of its finished jobs; None: not yet known."""
        if not self.done or self.is_done:
            return None
        return self.seconds() / self.done * (self.total - self.done)


class Stages:
    """All stages of a start, in the order in which their first jobs began.

    Attributes:
        planned: jobs of each rule.
    """

    def __init__(self) -> None:
        self.planned: dict[str, int] = {}
        self.num_done = 0
        self._stages: dict[tuple[str, str], Stage] = {}
        self._jobs: dict[int, StartedJob] = {}

    def __iter__(self) -> Iterator[Stage]:
        return iter([*self._stages.values()])

    @property
    def num_planned(self) -> int:
        return sum(self.planned.values())

    @property
    def running(self) -> list[Stage]:
        """Stages with jobs that run."""
        return [stage for stage in self._stages.values() if stage.running]

    @property
    def runs(self) -> list[str]:
        """Runs whose jobs have begun."""
        return [*dict.fromkeys(job.run for job in self._jobs.values() if job.run)]

    @property
    def outputs(self) -> list[str]:
        """Outputs of the jobs that are done."""
        running = {number for stage in self._stages.values() for number in stage.running}
        done = [job for job in self._jobs.values() if job.number not in running]
        return [path for job in done for path in job.outputs]

    def plan(self, counts: dict[str, int]) -> None:
        """Take the number of jobs of each rule; a checkpoint of the DAG may add some."""
        self.planned = {rule: number for rule, number in counts.items() if rule != "total"}

    def begin(self, event: Event) -> StartedJob:
        """Add a job that begins."""
        wildcards = event["wildcards"]
        reasons = [part.partition(":")[0] for part in event["reason"].split("; ") if part]
        job = StartedJob(
            event["jobid"],
            event["rule"],
            wildcards.get("run", ""),
            event["output"],
            event["log"],
            reasons=[each for each in reasons if each != _REASON_OF_OTHERS] or reasons,
        )
        self._jobs[job.number] = job
        key = (job.rule, job.run)
        if key not in self._stages:
            self._stages[key] = Stage(job.rule, job.run, 0, time.monotonic())
        stage = self._stages[key]
        stage.running[job.number] = job
        begun = stage.done + stage.failed + len(stage.running)
        others = any(each.rule == job.rule and each is not stage for each in self._stages.values())
        # Snakemake counts jobs by rule; a rule with several runs has the jobs that have begun.
        stage.total = begun if others or job.run else self.planned.get(job.rule, begun)
        return job

    def finish(self, number: int) -> Stage | None:
        """Mark a job as done; return its stage."""
        job = self._jobs.get(number)
        if job is None:
            return None
        stage = self._stages[job.rule, job.run]
        if stage.running.pop(number, None) is None:
            return None
        stage.done += 1
        stage.ended = time.monotonic()
        self.num_done += 1
        for path in job.outputs:
            _count_datasets(stage, path)
        return stage

    def fail(self, number: int) -> StartedJob | None:
        """Mark a job as failed; Snakemake may start it again."""
        job = self._jobs.get(number)
        if job is not None:
            stage = self._stages[job.rule, job.run]
            stage.failed += stage.running.pop(number, None) is not None
        return job


def _count_datasets(stage: Stage, path: str) -> None:
    """Add the datasets that a job batch has written, if `path` is its summary."""
    if counts := written(Path(path)):
        stage.documents += counts[0]
        stage.tokens += counts[1]
        stage.bytes += counts[2]
