"""The workflow: a box for each stage with its state, jobs and time."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from tokamake.config.data_set import DEFAULT
from tokamake.errors import UserError
from tokamake.report import html_pages
from tokamake.report.page.contents import PageContents
from tokamake.status.jobs import FILE, JobState, read_jobs, states
from tokamake.status.overview import ORDER
from tokamake.units import duration

TITLE = "Workflow"
PLACE = 10

_WIDTH, _HEIGHT, _GAP, _LAYER_GAP, _PER_ROW = 168, 44, 16, 24, 6
_SIGNS = {"done": "✓", "running": "▶", "stopped": "◼", "failed": "✗", "waiting": "…"}


class DrawnStage(NamedTuple):
    """The jobs of a rule."""

    rule: str
    jobs: list[JobState]
    seconds: float
    """Time of its finished jobs."""

    @property
    def state(self) -> str:
        """The state that a reader should see first."""
        return min((job.state for job in self.jobs), key=ORDER.index)

    @property
    def num_done(self) -> int:
        return sum(job.state == "done" for job in self.jobs)


def render(contents: PageContents) -> str:
    """A drawing of the stages in the order of the data flow, and the same as a table."""
    try:
        jobs = _jobs(contents)
    except UserError as error:
        # Without a file, the results were copied, or a stage ran by itself.
        if any(any(contents.results.glob(f"{folder}/{FILE}")) for folder in ("*", "data/*")):
            contents.faults.append(str(error))
        return ""
    spent = contents.costs.groupby("stage")["seconds"].sum()
    by_rule: dict[str, list[JobState]] = {}
    for job in jobs:
        by_rule.setdefault(job.job.rule, []).append(job)
    stages = [DrawnStage(rule, own, float(spent.get(rule, 0.0))) for rule, own in by_rule.items()]
    counts = {state: sum(job.state == state for job in jobs) for state in ORDER}
    text = ", ".join(f"{number:,} {state}" for state, number in counts.items() if number)
    if not jobs:
        return ""
    return (
        f"<p>{len(jobs):,} jobs: {text}.</p>\n"
        f'<div class="beside">{_drawing(stages, text)}<div>{_table(stages)}</div></div>'
    )


def _jobs(contents: PageContents) -> list[JobState]:
    """Jobs of the runs and of their data folders, except for the report itself."""
    if contents.results.name != "results":
        return []
    root = contents.results.parent
    names = {
        "" if each.name == DEFAULT else f" {each.name}" for each in contents.data_sets.values()
    }
    wanted = {f"data{name}" for name in names} | {f"run {run}" for run in contents.folders}
    found = []
    for title, group in read_jobs(root).items():
        if title in wanted or title == "starts" or not names:
            jobs = states(root, group.jobs, lives=group.lives())
            found += [job for job in jobs if job.job.rule != "report"]
    return found


def _edges(stages: Sequence[DrawnStage]) -> list[set[int]]:
    """For each stage, the numbers of the stages that it reads directly.

    Stages that it reads through another one are left out, and so are later segments of a run.
    """
    made_by = {
        path: number
        for number, stage in enumerate(stages)
        for job in stage.jobs
        for path in job.job.outputs
    }
    read: list[set[int]] = []
    above: list[set[int]] = []
    for number, stage in enumerate(stages):
        inputs = {made_by.get(path, number) for job in stage.jobs for path in job.job.inputs}
        inputs = {each for each in inputs if each < number}
        through = set().union(*(above[each] for each in inputs))
        read.append(inputs - through)
        above.append(inputs | through)
    return read


def _layers(read: Sequence[set[int]]) -> list[list[int]]:
    """Stages by the longest way from the raw data, in rows of a limited length."""
    depth: list[int] = []
    for inputs in read:
        depth.append(max((depth[each] + 1 for each in inputs), default=0))
    rows: list[list[int]] = []
    for layer in range(max(depth, default=-1) + 1):
        members = [number for number in range(len(read)) if depth[number] == layer]
        rows += [members[first : first + _PER_ROW] for first in range(0, len(members), _PER_ROW)]
    return rows


def _drawing(stages: Sequence[DrawnStage], text: str) -> str:
    """SVG of the stages; colours and dashes are in style.css, signs say the same."""
    read = _edges(stages)
    rows = _layers(read)
    longest = max(map(len, rows), default=1)
    width = longest * (_WIDTH + _GAP) + _GAP
    places = {}
    for layer, row in enumerate(rows):
        left = (width - len(row) * (_WIDTH + _GAP) + _GAP) / 2
        for column, number in enumerate(row):
            places[number] = left + column * (_WIDTH + _GAP), 2.0 + layer * (_HEIGHT + _LAYER_GAP)
    height = len(rows) * (_HEIGHT + _LAYER_GAP) - _LAYER_GAP + 4
    paths = [
        _path(places[start], places[end])
        for end, inputs in enumerate(read)
        for start in sorted(inputs)
    ]
    boxes = [_box(stage, places[number]) for number, stage in enumerate(stages)]
    return (
        f'<div class="wide"><svg class="dag" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px" role="img" '
        f'aria-label="Stages of the workflow: {escape(text)}">\n'
        + "\n".join([*paths, *boxes])
        + "\n</svg></div>"
    )


def _path(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1 = start[0] + _WIDTH / 2, start[1] + _HEIGHT
    x2, y2 = end[0] + _WIDTH / 2, end[1]
    middle = (y1 + y2) / 2
    return (
        f'<path d="M{x1:.0f} {y1:.0f} C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} '
        f'{x2:.0f} {y2:.0f}"/>'
    )


def _box(stage: DrawnStage, place: tuple[float, float]) -> str:
    x, y = place
    jobs = f"{stage.num_done:,} of {len(stage.jobs):,}" if len(stage.jobs) > 1 else stage.state
    time = f" · {duration(stage.seconds)}" if stage.seconds else ""
    middle = x + _WIDTH / 2
    return (
        f'<g class="{stage.state}"><title>{escape(stage.rule)}: {stage.state}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="7"/>'
        f'<text x="{middle:.0f}" y="{y + 18:.0f}">{_SIGNS[stage.state]} {escape(stage.rule)}</text>'
        f'<text class="small" x="{middle:.0f}" y="{y + 35:.0f}">{escape(jobs + time)}</text></g>'
    )


def _table(stages: Sequence[DrawnStage]) -> str:
    rows = [
        [
            stage.rule,
            stage.state,
            f"{stage.num_done:,} of {len(stage.jobs):,}",
            duration(stage.seconds) if stage.seconds else "–",
        ]
        for stage in stages
    ]
    return html_pages.table(["stage", "state", "jobs done", "time of all jobs"], rows)
