"""Tool `status`: states of all stages, and progress of training."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokamake.config.data_set import DEFAULT
from tokamake.runtime.console import print_lines
from tokamake.units import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tokamake.status.jobs import JobState
    from tokamake.status.overview import Overview
    from tokamake.status.runs import Origin

_MAX_NAMES = 8


def status(
    run: str = "",
    *,
    state: Literal["running", "failed", "stopped", "waiting", "done"] | None = None,
    watch: bool = False,
    json: bool = False,
    folder: Path = Path(),
) -> None:
    """Print the progress of a workflow, from its files only.

    A line shows a run, a data folder or a report; running ones come first. The workflow may run on
    another machine that shares the disk, or not run at all. A job of this machine is "running" as
    long as its process lives. A job of another machine is "running" as long as Snakemake lists it
    and holds the lock of the folder, or for ten minutes after its last output. A stage stays "done"
    if its inputs change; `snakemake -n` lists the jobs that would run again.

    Args:
        run: Show the stages of this run, and the end of the logs of failed jobs.
        state: Show only runs, data folders and reports in this state.
        watch: Draw it again every two seconds, with bars and losses, until Ctrl-C.
        json: Print a JSON object, for programs.
        folder: Working directory of the workflow, which contains results/ and logs/.
    """
    from tokamake.errors import UserError
    from tokamake.status.jobs import read_jobs
    from tokamake.status.overview import overviews
    from tokamake.status.workflow_process import workflow_text

    if not any((folder / name).is_dir() for name in ("results", "logs")):
        raise UserError(
            f"{folder}: neither results nor logs in it; give the folder that Snakemake runs in "
            "with --folder"
        )

    def read() -> "tuple[list[Overview], str]":
        groups = read_jobs(folder, run)
        if run:
            groups = {title: each for title, each in groups.items() if title == f"run {run}"}
        found = overviews(folder, groups, now=time.time())
        chosen = [each for each in found if state is None or each.state == state]
        return chosen, workflow_text(folder, groups.values())

    if run:
        _check_run(folder, run)
    if watch:
        _watch(folder, read)
        return
    found, title = read()
    if json:
        print(_as_json(folder, found))
        return
    for each in found:
        if each.fault:
            print(f"tokamake status: {each.fault}", file=sys.stderr)
    shown = _details(folder, found[0]) if run and found else _overview(folder, found)
    print_lines([title, *shown])


def _check_run(folder: Path, run: str) -> None:
    from difflib import get_close_matches

    from tokamake.errors import UserError
    from tokamake.status.jobs import FILE

    if (folder / "results" / run / FILE).is_file():
        return
    names = sorted(path.parent.name for path in folder.glob(f"results/*/{FILE}"))
    names = [name for name in names if name != "data"]
    near = get_close_matches(run, names, n=1)
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    known = f"there are {', '.join(names[:_MAX_NAMES])}{more}" if names else "there are none"
    advice = f"did you mean {near[0]}?" if near else known
    raise UserError(f"{run}: no run with this name has begun in {folder.resolve()}; {advice}")


def _watch(folder: Path, read: Any) -> None:
    from rich.text import Text

    from tokamake.errors import UserError
    from tokamake.status.snakemake_internals import read_marks
    from tokamake.status.watch import screen, watch

    def draw() -> "RenderableType":
        try:
            found, title = read()
            return screen(folder, found, title=title, marks=read_marks(folder))
        except (OSError, UserError) as error:  # a start of Snakemake replaces the file
            return Text(str(error))

    if not sys.stdout.isatty():
        raise UserError("--watch: standard output is no terminal; leave it out")
    watch(draw)


# ---- Text ----


def _overview(folder: Path, found: "Sequence[Overview]") -> list[str]:
    """A line a group."""
    from tokamake.status.overview import described_group, ordered

    width = max((len(each.title) for each in found), default=0)
    lines = [
        f"{each.state:8} {each.title:<{width}}  {described_group(folder, each)}"
        for each in ordered(found)
    ]
    failed = next((each for each in ordered(found) if each.run and each.state == "failed"), None)
    if failed:
        lines.append(f"the end of its logs: tokamake status {failed.run}")
    return lines or ["nothing to show"]


def _details(folder: Path, found: "Overview") -> list[str]:
    """Stages of a run by state, its training, its origin, and the end of logs of failed jobs."""
    from tokamake.status.overview import ORDER, stopped_text
    from tokamake.status.runs import read_origin

    lines = [found.title]
    for state in ORDER:
        names = dict.fromkeys(job.job.rule for job in found.jobs if job.state == state)
        if names:
            summaries = ", ".join(_summary(name, state, jobs=found.jobs) for name in names)
            lines.append(f"  {state:8} {summaries}")
    lines += _training_lines(found)
    if found.state == "stopped":
        lines.append(f"  {stopped_text(folder, found)}")
    lines += _origin_lines(read_origin(folder, found.run))
    return lines + _failures(folder, found)


def _failures(folder: Path, found: "Overview") -> list[str]:
    from tokamake.status.overview import tail

    lines = []
    for job in found.jobs:
        if job.state == "failed":
            last = tail(folder / job.job.log)
            ends = "ends with:" if last else "is empty"
            lines.append(f"failed: {job.job.rule}, {job.job.log} {ends}")
            lines += [f"  {line}" for line in last]
    return lines


def _training_lines(found: "Overview") -> list[str]:
    from tokamake.status.overview import late_text
    from tokamake.status.runs import described

    if (training := found.training) is None:
        return []
    is_over = training.step >= training.steps
    shown = training if found.state == "running" else training._replace(seconds_left=None)
    progress = described(shown)
    if not is_over:
        progress += f", last line {_ago(training.silent_seconds)}"
    late = [f"  {text}" for text in [late_text(found)] if text]
    slow = [f"  slow     {text}" for text in training.slow_ranks if not is_over]
    return [f"  training {progress}", *late, *slow]


def _origin_lines(origin: "Origin") -> list[str]:
    """Return lines about the origin of a run, unless all is the default."""
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


# ---- JSON ----


def _as_json(folder: Path, found: "Sequence[Overview]") -> str:
    import orjson

    from tokamake.status.overview import described_group, tail
    from tokamake.status.runs import read_origin

    jobs: list[dict[str, Any]] = []
    for group in found:
        jobs += [
            {
                "group": group.title,
                "stage": job.job.rule,
                "product": job.job.outputs[0],
                "log": job.job.log,
                "state": job.state,
                "silent_seconds": job.silent_seconds,
                **({"last_lines": tail(folder / job.job.log)} if job.state == "failed" else {}),
            }
            for job in group.jobs
        ]
    texts = {
        each.title: {"state": each.state, "text": described_group(folder, each)} for each in found
    }
    runs = [each for each in found if each.run]
    report = {
        "groups": texts,
        "jobs": jobs,
        "training": {each.run: each.training._asdict() for each in runs if each.training},
        "runs": {each.run: read_origin(folder, each.run)._asdict() for each in runs},
    }
    # JSON has neither NaN nor infinity; orjson writes null for both.
    return orjson.dumps(report, option=orjson.OPT_INDENT_2).decode()
