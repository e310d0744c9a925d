"""Tool `status`: states of all stages, and progress of training."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.config.data_set import DEFAULT
from tokamake.units import duration

if TYPE_CHECKING:
    from tokamake.status.jobs import JobState
    from tokamake.status.runs import Origin, TrainingProgress

_STATES = ("failed", "stopped", "running", "done", "waiting")
_LAST_LINES = 5


def status(folder: Path = Path(), *, json: bool = False) -> None:
    """Print the progress of a workflow, from its files only.

    The workflow may run on another machine that shares the disk, or not run at all. A job is
    "running" as long as Snakemake lists it and holds the lock of the folder. Both stay when
    Snakemake is killed: check the time of the last output. After `--unlock`, a job that has written
    nothing for ten minutes is "failed". A stage stays "done" if its inputs change; `snakemake -n`
    lists the jobs that would run again.

    Args:
        folder: Working directory of the workflow, which contains results/ and logs/.
        json: Print a JSON object, for programs.
    """
    from tokamake.errors import UserError
    from tokamake.status.jobs import read_jobs, states
    from tokamake.status.runs import read_origin, read_training

    if not any((folder / name).is_dir() for name in ("results", "logs")):
        raise UserError(
            f"{folder}: neither results nor logs in it; give the folder that Snakemake runs in"
        )
    now = time.time()
    groups = {title: states(folder, jobs) for title, jobs in read_jobs(folder).items()}
    runs = [title.removeprefix("run ") for title in groups if title.startswith("run ")]
    trainings = {}
    for run in runs:
        try:
            training = read_training(folder, run, now=now)
        except UserError as error:  # the other runs are well
            print(f"tokamake status: {error}", file=sys.stderr)
            continue
        if training:
            trainings[f"run {run}"] = training
    origins = {f"run {run}": read_origin(folder, run) for run in runs}
    if json:
        print(_as_json(folder, groups, trainings=trainings, origins=origins))
        return
    for title, members in groups.items():
        lines = _lines(members, trainings.get(title)) + _origin_lines(origins.get(title))
        print("\n".join([title, *lines]))
    for members in groups.values():
        for job in members:
            if job.state == "failed":
                lines = _tail(folder / job.job.log)
                ends = "ends with:" if lines else "is empty"
                print(f"failed: {job.job.rule}, {job.job.log} {ends}")
                print("".join(f"  {line}\n" for line in lines), end="")


def _lines(jobs: "list[JobState]", training: "TrainingProgress | None") -> list[str]:
    """Return a line per state with its stages, and a line on training."""
    lines = []
    for state in _STATES:
        names = dict.fromkeys(job.job.rule for job in jobs if job.state == state)
        if names:
            summaries = ", ".join(_summary(name, state, jobs=jobs) for name in names)
            lines.append(f"  {state:8} {summaries}")
    if training is None:
        return lines
    from tokamake.status.runs import described

    slow = training.slow_ranks if training.step < training.steps else []
    has_stopped = any(job.state == "stopped" for job in jobs)
    shown = training._replace(seconds_left=None) if has_stopped else training
    progress = described(shown)
    if training.step < training.steps:
        progress += f", last line {_ago(training.silent_seconds)}"
    return [*lines, f"  training {progress}", *(f"  slow     {text}" for text in slow)]


def _origin_lines(origin: "Origin | None") -> list[str]:
    """Return lines about the origin of a run, unless all is the default."""
    if origin is None:
        return []
    lines = [f"  starts from run {origin.parent}"] if origin.parent else []
    if origin.data_set != DEFAULT:
        lines.append(f"  data folder {origin.data_set}")
    if origin.replaced:
        first, *rest = origin.replaced
        more = f" and {len(rest):,} more" if rest else ""
        lines.append(f"  replaced since it was indexed: {first}{more}")
    return lines


def _summary(name: str, state: str, *, jobs: "list[JobState]") -> str:
    """Name of a stage, number of its jobs in a state, and last output of running jobs."""
    stage_jobs = [job for job in jobs if job.job.rule == name]
    selected = [job for job in stage_jobs if job.state == state]
    count = f" {len(selected):,} of {len(stage_jobs):,}" if len(stage_jobs) > 1 else ""
    silent = [job.silent_seconds for job in selected if job.silent_seconds is not None]
    output = f" (last output {_ago(min(silent))})" if state == "running" and silent else ""
    return f"{name}{count}{output}"


def _ago(seconds: float) -> str:
    return f"{duration(round(max(seconds, 0)))} ago"


def _tail(log: Path) -> list[str]:
    try:
        text = log.read_text(encoding="utf-8", errors="replace")[-10_000:]
    except OSError:
        return ["(no log)"]
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]


def _as_json(
    folder: Path,
    groups: "dict[str, list[JobState]]",
    *,
    trainings: "dict[str, TrainingProgress]",
    origins: "dict[str, Origin]",
) -> str:
    import orjson

    jobs: list[dict[str, Any]] = []
    for title, members in groups.items():
        jobs += [
            {
                "group": title,
                "stage": job.job.rule,
                "product": job.job.outputs[0],
                "log": job.job.log,
                "state": job.state,
                "silent_seconds": job.silent_seconds,
                **({"last_lines": _tail(folder / job.job.log)} if job.state == "failed" else {}),
            }
            for job in members
        ]
    training = {title.removeprefix("run "): value._asdict() for title, value in trainings.items()}
    runs = {title.removeprefix("run "): value._asdict() for title, value in origins.items()}
    report = {"jobs": jobs, "training": training, "runs": runs}
    # JSON has neither NaN nor infinity; orjson writes null for both.
    return orjson.dumps(report, option=orjson.OPT_INDENT_2).decode()
