"""The live screen of `tokamake status --watch`: what runs, drawn again and again from files."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.runtime.console import counted
from tokamake.status.jobs import JobState
from tokamake.status.overview import ORDER, Overview, described_group, late_text, ordered
from tokamake.status.runs import described
from tokamake.status.snakemake_internals import Marks, batch_job
from tokamake.units import duration, in_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_SECONDS = 2.0
"""Time between two looks at the files."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 40
_BAR_WIDTH = 20
_MAX_JOBS = 8
"""Jobs of a group that have a line."""
_MAX_OTHERS = 10
"""Groups that do not run and have a line."""


def watch(draw: "Callable[[], RenderableType]") -> None:
    """Draw a screen every two seconds until Ctrl-C, whose last state stays on the terminal."""
    from rich.live import Live

    with Live(draw(), auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                time.sleep(_SECONDS)
                live.update(draw(), refresh=True)
        except KeyboardInterrupt:
            pass


def screen(
    folder: Path, found: Sequence[Overview], *, title: str, marks: Marks
) -> "RenderableType":
    """The groups that run with bars and jobs; a line for each other group."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(f"{title}; {time.strftime('%H:%M:%S')}, Ctrl-C ends")]
    groups = ordered(found)
    for each in (group for group in groups if group.state == "running"):
        parts += [Text(f"\n{each.title}", style="bold"), _stages(folder, each)]
        if each.training and each.trainer and each.trainer.state == "running":
            parts.append(_training(each))
        parts.append(_jobs(folder, each, marks=marks))
    others = [group for group in groups if group.state != "running"]
    table = Table.grid(padding=(0, 1))
    for width in (len("running"), min(24, max((len(each.title) for each in others), default=0))):
        table.add_column(no_wrap=True, min_width=width)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for each in others[:_MAX_OTHERS]:
        table.add_row(each.state, each.title, Text(described_group(folder, each)))
    if len(others) > _MAX_OTHERS:
        table.add_row("", "", f"and {len(others) - _MAX_OTHERS:,} more: tokamake status")
    return Group(*parts, Text(""), table) if others else Group(*parts)


def _stages(folder: Path, found: Overview) -> "Table":
    """A bar for each stage of a group that has begun and is not done, and a line of the rest."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, min_width=18)
    table.add_column(width=_BAR_WIDTH)
    table.add_column(no_wrap=True, overflow="ellipsis")
    rest: dict[str, list[str]] = {}
    for rule in dict.fromkeys(each.job.rule for each in found.jobs):
        jobs = [each for each in found.jobs if each.job.rule == rule]
        present = {each.state for each in jobs}
        if len(present) == 1 and not present & {"running", "failed"}:
            rest.setdefault(jobs[0].state, []).append(rule)
            continue
        done, total, text = _progress(folder, found, jobs)
        table.add_row(f"  {rule}", ProgressBar(total=total, completed=done), text)
    for state in ORDER:
        if state in rest:
            table.add_row(f"  {state}", "", ", ".join(rest[state]))
    return table


def _progress(folder: Path, found: Overview, jobs: Sequence[JobState]) -> tuple[float, float, str]:
    """Done, total and text of a stage's bar."""
    if found.trainer in jobs and found.training:
        steps, total = found.training.step, max(found.training.steps, 1)
        return steps, total, f"{steps:,} of {counted(total, 'step')}, {steps / total:.0%}"
    done = sum(each.state == "done" for each in jobs)
    parts = [f"{done:,} of {counted(len(jobs), 'job')}, {done / len(jobs):.0%}"]
    counts = _written(folder, [each for each in jobs if each.state == "done"])
    if counts:
        documents, num_bytes = counts
        parts.append(f"{counted(documents, 'document')}, {in_bytes(num_bytes)}")
    if failed := sum(each.state == "failed" for each in jobs):
        parts.append(f"{failed:,} failed")
    return done, len(jobs), ", ".join(parts)


def _written(folder: Path, jobs: Sequence[JobState]) -> tuple[int, int] | None:
    """Documents and bytes in the datasets of finished job batches; None: they write none."""
    from tokamake.data.indexed.job_batch import written

    sums = [written(folder / path) for each in jobs for path in each.job.outputs]
    known = [each for each in sums if each]
    return (sum(n for n, _, _ in known), sum(n for _, _, n in known)) if known else None


def _training(found: Overview) -> "RenderableType":
    """Losses as a sparkline, speed and remaining time of a training."""
    assert found.training
    training = found.training
    lines = [f"{sparkline(training.losses)}  {described(training)}"]
    if training.flops_per_second:
        speed = f"{training.flops_per_second / 1e12:,.3g} TFLOP/s of the model"
        lines.append(speed + ("" if training.mfu is None else f", MFU {training.mfu:.0%}"))
    lines += [f"slow: {text}" for text in training.slow_ranks]
    lines += [text for text in [late_text(found)] if text]
    return _indented(lines)


def _indented(lines: Sequence[str]) -> "RenderableType":
    """Lines below the title of a group; long ones are folded with the same indent."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text("\n".join(lines)), (0, 0, 0, 2))


def sparkline(values: Sequence[float], width: int = _SPARKLINE_WIDTH) -> str:
    """Numbers as blocks of eight heights; means, if there are more than `width`."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    size = -(-len(finite) // width)
    chunks = [finite[start : start + size] for start in range(0, len(finite), size)]
    means = [sum(chunk) / len(chunk) for chunk in chunks]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[int((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)


def _jobs(folder: Path, found: Overview, *, marks: Marks) -> "RenderableType":
    """Running jobs with their host or id in the batch system, age, and last output."""
    running = [each for each in found.jobs if each.state == "running"]
    lines = []
    for each in running[:_MAX_JOBS]:
        markers = [marks.running[path] for path in each.job.outputs if path in marks.running]
        name = Path(each.job.log).stem
        title = each.job.rule if name == each.job.rule else f"{each.job.rule} {name}"
        parts = []
        if each.writer:
            parts.append(f"on {each.writer.host}")
        if markers and (number := batch_job(markers[0])):
            parts.append(f"job {number}")
        if markers:
            parts.append(f"for {duration(round(max(0, time.time() - _time(markers[0]))))}")
        if each.silent_seconds is not None:
            parts.append(f"last output {duration(round(max(0, each.silent_seconds)))} ago")
        lines.append(f"job {title}: {', '.join(parts)}")
    if len(running) > _MAX_JOBS:
        lines.append(f"and {counted(len(running) - _MAX_JOBS, 'job')} more")
    return _indented(lines)


def _time(marker: Path) -> float:
    try:
        return marker.stat().st_mtime
    except OSError:  # the job has ended
        return time.time()
