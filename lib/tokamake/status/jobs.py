"""Jobs of a workflow and their states in a folder.

When Snakemake starts jobs, the workflow writes the jobs of its DAG: the jobs of a run to
results/RUN/jobs.json, and the jobs that make data and reports to the data folder.
"""

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokamake import files
from tokamake.config.data_set import DEFAULT, RUN, DataSet
from tokamake.errors import UserError
from tokamake.status.snakemake_internals import running_outputs, started

FILE = "jobs.json"
_TAIL_BYTES, _TAIL_LINES = 4_000, 6
"""A launcher may write the last line of a log, so some lines before it are read, too."""
_MAX_SILENT_SECONDS = 600
"""A job of a batch system may outlive Snakemake; it is taken for dead after this time."""
_GROUPS = {
    **dict.fromkeys(("fetch_weights", "import_checkpoint"), "starts"),
    "report": "report",
}
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
    log was written recently.
    done: its files exist, or all jobs that read them are done.
    stopped: a training that was asked to stop has saved, and ended.
    failed: there is a log but no output, and the job is not running. A failure before the present
    start of Snakemake counts as waiting: Snakemake runs the job again."""
    silent_seconds: float | None
    """Seconds since the last write to its log; None: no log."""


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
        files.write_json(path, {"data_set": data_set.name, "jobs": dumped})


def _read(path: Path) -> dict[str, Any]:
    remedy = "start the workflow, which writes it"
    content = files.read_json(path, remedy)
    try:
        return {**content, "jobs": [DagJob(**job) for job in content["jobs"]]}
    except (TypeError, KeyError):
        raise UserError(f"{path}: not a list of jobs; {remedy}") from None


def data_set_of(folder: Path, run: str) -> DataSet:
    """Return the paths of a run's data folder."""
    return DataSet(_read(folder / RUN.format(run=run) / FILE)["data_set"])


def read_jobs(folder: Path) -> dict[str, list[DagJob]]:
    """Return group → jobs, in the order of the data flow: data folders, starts, runs, reports."""
    groups: dict[str, list[DagJob]] = {}
    reports: dict[str, list[DagJob]] = {}
    data = folder / DataSet().folder
    for path in filter(Path.is_file, [data / FILE, *sorted(data.glob(f"*/{FILE}"))]):
        content = _read(path)
        name = "" if content["data_set"] == DEFAULT else f" {content['data_set']}"
        groups[f"data{name}"] = []
        for job in content["jobs"]:
            group = _GROUPS.get(job.rule, "data")
            of_group = reports if group == "report" else groups
            of_group.setdefault(group if group == "starts" else f"{group}{name}", []).append(job)
    if starts := groups.pop("starts", []):  # data folders may share them
        groups["starts"] = [*{job.log: job for job in starts}.values()]
    for path in sorted(folder.glob(f"{RUN.format(run='*')}/{FILE}")):
        if path.parent != data:
            groups[f"run {path.parent.name}"] = _read(path)["jobs"]
    if not groups:
        raise UserError(
            f"{data}: no {FILE}, which the workflow writes when it starts jobs; run "
            "Snakemake again, with --forcerun report if there is nothing to be done"
        )
    return groups | reports


def states(folder: Path, jobs: Iterable[DagJob]) -> list[JobState]:
    """Return the state of each job of a group."""
    running, start = running_outputs(folder), started(folder)
    states: list[JobState] = []
    unfinished: set[str] = set()
    """Inputs of jobs that are not done."""
    read: set[str] = set()
    for job in reversed(list(jobs)):  # readers of its outputs come first
        log, outputs = folder / job.log, {*job.outputs}
        silent = time.time() - log.stat().st_mtime if log.is_file() else None
        may_outlive = not job.is_local and (silent or 0) < _MAX_SILENT_SECONDS
        is_alive = start is not None or may_outlive
        is_old = silent is not None and start is not None and log.stat().st_mtime < start
        is_read = not read.isdisjoint(outputs) and unfinished.isdisjoint(outputs)
        if is_alive and not running.isdisjoint(outputs):
            state: State = "running"
        elif is_read or all(_exists(folder / path) for path in outputs):
            state = "done"
        elif silent is None or is_old:
            state = "waiting"
        else:
            has_stopped = job.rule in ("train", "finetune") and _has_stopped(log)
            state = "stopped" if has_stopped else "failed"
        read.update(job.inputs)
        if state != "done":
            unfinished.update(job.inputs)
        states.append(JobState(job, state, silent))
    return states[::-1]


def _exists(path: Path) -> bool:
    """Whether a file exists, or a folder with files."""
    return path.is_file() or any(each.is_file() for each in path.rglob("*"))


def _has_stopped(log: Path) -> bool:
    """Whether a training log says that the training stopped on request."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = stream.read().splitlines()[-_TAIL_LINES:]
    return any(line.startswith(b"stopped ") and b": saved at step " in line for line in lines)
