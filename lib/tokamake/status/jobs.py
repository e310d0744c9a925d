"""Jobs of a workflow and their states in a folder.

When Snakemake starts jobs, the workflow writes the jobs of its DAG: the jobs of a run to
results/RUN/jobs.json, and the jobs that make data and reports to the data folder.
"""

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokamake import files
from tokamake.config.data_set import DEFAULT, RUN, DataSet
from tokamake.errors import UserError
from tokamake.runtime.folder_lock import WritingProcess, this_process, writer, writer_of
from tokamake.status.snakemake_internals import Marks, read_marks

FILE = "jobs.json"
TRAININGS = ("train", "finetune")
"""Rules of trainings, whose process locks results/RUN/training."""
_TAIL_BYTES, _TAIL_LINES = 4_000, 6
"""A launcher may write the last line of a log, so some lines before it are read, too."""
_MAX_SILENT_SECONDS = 600
"""A job of a batch system may outlive Snakemake; it is taken for dead after this time."""
STARTS = ("fetch_weights", "import_checkpoint")
"""Rules that make initial checkpoints, which runs may share."""
_GROUPS = {**dict.fromkeys(STARTS, "starts"), "report": "report"}
"""Group of a rule without the wildcard `run`, if it does not make data."""

State = Literal["done", "running", "stopped", "failed", "waiting"]


class DagJob(NamedTuple):
    """A job of the DAG."""

    rule: str
    run: str
    """Empty: the job belongs to no run."""
    outputs: list[str]
    inputs: list[str]
    """Outputs of other jobs that it reads."""
    log: str
    is_local: bool = False
    """Whether it runs on the machine of Snakemake, and ends with it."""


class JobState(NamedTuple):
    """The state of a job."""

    job: DagJob
    state: State
    """running: Snakemake lists the job and holds its lock, or a batch system may still run it: its
    log was written recently. On this host, the process of Snakemake or of the training lives.
    done: its files exist, or it has made temporary ones, and all jobs that read them are done.
    stopped: it was asked to stop and has ended, or it was killed together with Snakemake.
    failed: there is a log but no output, and the job is not running. A failure before the present
    start of Snakemake counts as waiting: Snakemake runs the job again."""
    silent_seconds: float | None
    """Seconds since the last write to its log; None: no log."""
    writer: WritingProcess | None = None
    """Process of a training that has begun, and has not ended by itself."""


class Group(NamedTuple):
    """Jobs of a run, of a data folder, or of its report."""

    jobs: list[DagJob]
    writers: tuple[str, ...]
    """Processes of Snakemake that have written the lists of jobs."""

    def lives(self) -> bool | None:
        """Whether one of these processes runs; None: it is a process of another host."""
        alive = [found.lives if (found := writer(words)) else None for words in self.writers]
        return None if not alive else True if True in alive else None if None in alive else False


def write_jobs(jobs: Iterable[DagJob], data_set: DataSet, *, rules: Collection[str]) -> None:
    """Write the jobs of a DAG, in the order of the data flow.

    Jobs of earlier starts stay if they have begun, this DAG has none of their rule, and the rule is
    one of `rules`, the rules of the workflow.
    """
    by_folder: dict[str, list[DagJob]] = {}
    for job in jobs:
        folder = RUN.format(run=job.run) if job.run else data_set.folder
        by_folder.setdefault(folder, []).append(job)
    for folder, planned in by_folder.items():
        path, kept = Path(folder, FILE), {*rules} - {job.rule for job in planned}
        with suppress(UserError):  # there is none yet, or it is damaged
            earlier = _read(path)["jobs"]
            planned += [job for job in earlier if job.rule in kept and Path(job.log).exists()]
        dumped = [job._asdict() for job in planned]
        content = {"data_set": data_set.name, "writer": this_process(), "jobs": dumped}
        files.write_json(path, content)


def _read(path: Path) -> dict[str, Any]:
    remedy = "start the workflow, which writes it"
    content = files.read_json(path, remedy)
    try:
        return {**content, "jobs": [DagJob(**job) for job in content["jobs"]]}
    except (TypeError, KeyError):
        raise UserError(f"{path}: not a list of jobs; {remedy}") from None


def written_at(folder: Path) -> float:
    """Time of the newest list of jobs; 0: there is none."""
    paths = (
        folder.glob(f"{RUN.format(run='*')}/{FILE}"),
        folder.glob(f"{DataSet('*').folder}/{FILE}"),
    )
    return max((_changed(path) or 0 for path in chain(*paths)), default=0)


def data_set_of(folder: Path, run: str) -> DataSet:
    """Return the paths of a run's data folder."""
    return DataSet(_read(folder / RUN.format(run=run) / FILE)["data_set"])


def read_jobs(folder: Path, run: str = "") -> dict[str, Group]:
    """Return title → group, in the order of the data flow: data folders, starts, runs, reports.

    Args:
        run: the only run to read; empty: all.

    Raises:
        UserError: the workflow has not written any jobs, or a file is damaged.
    """
    groups: dict[str, Group] = {}
    reports: dict[str, Group] = {}
    data = folder / DataSet().folder
    for path in filter(Path.is_file, [data / FILE, *sorted(data.glob(f"*/{FILE}"))]):
        content = _read(path)
        name = "" if content["data_set"] == DEFAULT else f" {content['data_set']}"
        _add(groups, f"data{name}", content=content, jobs=[])
        for job in content["jobs"]:
            group = _GROUPS.get(job.rule, "data")
            of_group = reports if group == "report" else groups
            title = group if group == "starts" else f"{group}{name}"
            _add(of_group, title, content=content, jobs=[job])
    if starts := groups.pop("starts", None):  # data folders may share them
        groups["starts"] = starts._replace(jobs=[*{job.log: job for job in starts.jobs}.values()])
    for path in sorted(folder.glob(f"{RUN.format(run=run or '*')}/{FILE}")):
        if path.parent != data:
            content = _read(path)
            _add(groups, f"run {path.parent.name}", content=content, jobs=content["jobs"])
    if not groups:
        raise UserError(
            f"{data}: no {FILE}, which the workflow writes when it starts jobs; run "
            "Snakemake again, with --forcerun report if there is nothing to be done"
        )
    return groups | reports


def _add(
    groups: dict[str, Group], title: str, *, content: dict[str, Any], jobs: list[DagJob]
) -> None:
    before = groups.get(title, Group([], ()))
    writers = dict.fromkeys((*before.writers, content.get("writer", "")))
    groups[title] = Group([*before.jobs, *jobs], (*writers,))


def states(
    folder: Path,
    jobs: Iterable[DagJob],
    *,
    marks: Marks | None = None,
    lives: bool | None = None,
) -> list[JobState]:
    """Return the state of each job of a group.

    Args:
        marks: marks of Snakemake, if they are read already.
        lives: whether its process runs; None: not known, it may be on another host.
    """
    marks = read_marks(folder) if marks is None else marks
    start = None if lives is False else marks.started
    states: list[JobState] = []
    unfinished: set[str] = set()
    """Inputs of jobs that are not done."""
    read: set[str] = set()
    for job in reversed(list(jobs)):  # readers of its outputs come first
        log, outputs = folder / job.log, {*job.outputs}
        written = _changed(log)
        silent = None if written is None else time.time() - written
        trainer = writer_of(training_folder(folder, job)) if job.rule in TRAININGS else None
        is_recent = (silent or 0) < _MAX_SILENT_SECONDS
        is_marked = not outputs.isdisjoint(marks.running)
        is_current = is_marked and not _is_stale(outputs, marks, start=start)
        is_alive = start is not None or (not job.is_local and is_recent)
        # The process of a training knows better than marks; a killed one may start again.
        if trainer and not (lives and is_current):
            is_alive = is_recent if trainer.lives is None else trainer.lives
        is_old = written is not None and start is not None and written < start
        # Files of a training stay. Without them, it has begun again, and readers are of earlier.
        is_temporary = job.rule not in TRAININGS and not is_marked
        is_read = is_temporary and not read.isdisjoint(outputs) and unfinished.isdisjoint(outputs)
        if is_alive and (trainer or is_current):
            state: State = "running"
        elif is_read or all(_exists(folder / path) for path in outputs):
            state = "done"
        elif silent is None or (is_old and not trainer):
            state = "waiting"
        else:
            state = "stopped" if is_marked or _has_stopped(log) else "failed"
        read.update(job.inputs)
        if state != "done":
            unfinished.update(job.inputs)
        states.append(JobState(job, state, silent, trainer))
    return states[::-1]


def _is_stale(outputs: set[str], marks: Marks, *, start: float | None) -> bool:
    """Whether the marks of a job are older than the present start of Snakemake."""
    times = (_changed(marks.running[path]) for path in outputs & marks.running.keys())
    # A job that has ended since the marks were read has none.
    return start is not None and max(time or 0 for time in times) < start


def _changed(path: Path) -> float | None:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return None


def training_folder(folder: Path, job: DagJob) -> Path:
    """Output folder of the training of a job's run."""
    return folder / RUN.format(run=job.run) / "training"


def _exists(path: Path) -> bool:
    """Whether a file exists, or a folder with files."""
    return path.is_file() or any(each.is_file() for each in path.rglob("*"))


def _has_stopped(log: Path) -> bool:
    """Whether a log says that its job was asked to stop, and has ended."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = stream.read().splitlines()[-_TAIL_LINES:]
    return any(
        (line.startswith(b"stopped ") and b": saved at step " in line)
        or line.endswith(b": stopped; the same command continues")
        for line in lines
    )
