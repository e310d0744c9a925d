"""One line a group of jobs: its state, how far it is, and why it does not continue."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tokamake.errors import UserError
from tokamake.runtime.console import counted
from tokamake.status.jobs import TRAININGS, Group, JobState, State, states
from tokamake.status.runs import TrainingProgress, described, read_training, saved_step
from tokamake.status.snakemake_internals import Marks, read_marks
from tokamake.units import duration

ORDER: tuple[State, ...] = ("running", "failed", "stopped", "waiting", "done")
"""States in the order of the lines."""
_LAST_LINES = 5
_TAIL_BYTES = 10_000
_LATE = 5
"""A training of another host is late when its next line takes this many times as long as usual."""
_LATE_SECONDS = 60


class Overview(NamedTuple):
    """A group of jobs at a glance."""

    title: str
    """`data`, `run NAME`, `report` and the like."""
    jobs: list[JobState]
    training: TrainingProgress | None
    fault: str
    """Why its metrics cannot be read; empty: they can."""

    @property
    def run(self) -> str:
        """Name of the run; empty: it is another group."""
        return self.title.removeprefix("run ") if self.title.startswith("run ") else ""

    @property
    def state(self) -> State:
        """The first of `ORDER` that one of its jobs has; a group is done when all of them are."""
        found = {each.state for each in self.jobs}
        return next((state for state in ORDER if state in found), "done")

    @property
    def trainer(self) -> JobState | None:
        """The training that runs, or that was the last one to end."""
        trainings = [each for each in self.jobs if each.job.rule in TRAININGS]
        begun = [each for each in trainings if each.state not in ("waiting", "done")]
        return next(iter(begun or trainings), None)


def overviews(
    folder: Path, groups: dict[str, Group], *, now: float | None = None
) -> list[Overview]:
    """Read all groups: their jobs, and the metrics of runs."""
    marks = read_marks(folder)
    now = time.time() if now is None else now
    return [
        _overview(folder, title, group=group, marks=marks, now=now)
        for title, group in groups.items()
        if group.jobs
    ]


def _overview(folder: Path, title: str, *, group: Group, marks: Marks, now: float) -> Overview:
    jobs = states(folder, group.jobs, marks=marks, lives=group.lives())
    training, fault = None, ""
    if title.startswith("run "):
        try:
            training = read_training(folder, title.removeprefix("run "), now=now)
        except UserError as error:  # the other runs are well
            fault = str(error)
    return Overview(title, jobs, training, fault)


def ordered(found: Iterable[Overview]) -> list[Overview]:
    """Running groups first, then failed ones; of one state, runs first."""
    return sorted(found, key=lambda each: (ORDER.index(each.state), not each.run))


# ---- Text ----


def described_group(folder: Path, found: Overview) -> str:
    """Progress of a group, or why it does not continue."""
    if found.fault:
        return found.fault
    match found.state:
        case "running":
            return _running(found)
        case "failed":
            failed = _first(found, "failed")
            return f"{failed.job.rule}: {(tail(folder / failed.job.log) or ['empty log'])[-1]}"
        case "stopped":
            return stopped_text(folder, found)
        case "waiting":
            done = sum(each.state == "done" for each in found.jobs)
            text = f"{done:,} of {counted(len(found.jobs), 'job')} done"
            return f"{text}, next: {_first(found, 'waiting').job.rule}"
    if found.training:
        return described(found.training)
    return counted(len(found.jobs), "job")


def _first(found: Overview, state: State) -> JobState:
    return next(each for each in found.jobs if each.state == state)


def _running(found: Overview) -> str:
    running = [each for each in found.jobs if each.state == "running"]
    names = dict.fromkeys(each.job.rule for each in running)
    trainer = found.trainer
    if trainer in running and found.training:
        text = described(found.training)
        if late := late_text(found):
            text += f", {late}"
        others = [name for name in names if name not in TRAININGS]
        return ", ".join([text, *others])
    texts = []
    for name in names:
        jobs = [each for each in found.jobs if each.job.rule == name]
        done = sum(each.state == "done" for each in jobs)
        texts.append(f"{name} {done:,} of {len(jobs):,} done" if len(jobs) > 1 else name)
    return ", ".join(texts)


def late_text(found: Overview) -> str:
    """Says that a training of another host has been silent for much longer than usual."""
    training, trainer = found.training, found.trainer
    if not (training and trainer and trainer.writer and trainer.writer.lives is None):
        return ""
    usual = training.line_seconds or 0
    if training.silent_seconds <= max(_LATE * usual, _LATE_SECONDS):
        return ""
    silent = duration(round(training.silent_seconds))
    return (
        f"silent for {silent}, {duration(round(usual))} is usual: look on {trainer.writer.host} "
        "whether it lives"
    )


def stopped_text(folder: Path, found: Overview) -> str:
    """At which step a training stopped, and what is saved; or which stages stopped."""
    again = "the same command continues"
    names = dict.fromkeys(each.job.rule for each in found.jobs if each.state == "stopped")
    if not found.training or names.keys().isdisjoint(TRAININGS):
        return f"{', '.join(names)} stopped; {again}"
    step, steps = found.training.step, found.training.steps
    saved = saved_step(folder, found.run)
    if saved is None:
        return f"stopped at step {step:,} of {steps:,}, nothing saved yet; {again} from the start"
    if saved < step:
        return f"killed at step {step:,} of {steps:,}, saved at step {saved:,}; {again} from there"
    return f"stopped at step {saved:,} of {steps:,}, saved; {again}"


def tail(log: Path, lines: int = _LAST_LINES) -> list[str]:
    """Last lines of a log that are not empty."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ["(no log)"]
    return [line for line in text.splitlines() if line.strip()][-lines:]
