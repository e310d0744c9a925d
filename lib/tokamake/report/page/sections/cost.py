"""Time, node-hours and memory of each stage."""

import pandas as pd

from tokamake.report import html_pages
from tokamake.report.html_pages import cell
from tokamake.report.page.contents import PageContents
from tokamake.report.page.figures import Axes
from tokamake.units import duration, in_bytes

TITLE = "Cost"
PLACE = 80

_MAX_BARS = 12


def render(contents: PageContents) -> str:
    """A figure and a table: a row for each stage, the largest first."""
    spent = contents.costs
    if spent.empty:
        return ""
    stages = spent.groupby("stage", sort=False).agg(
        jobs=("job", "count"), seconds=("seconds", "sum"), longest=("seconds", "max"),
        node_hours=("node_hours", "sum"), max_rss_mb=("max_rss_mb", "max"),
    ).sort_values("node_hours", ascending=False)  # fmt: skip
    rows = [
        [
            stage,
            f"{row.jobs:,}",
            duration(float(row.seconds)),
            duration(float(row.longest)),
            cell(row.node_hours, ".3g"),
            "–" if pd.isna(row.max_rss_mb) else in_bytes(round(row.max_rss_mb * 2**20)),
        ]
        for stage, row in ((row.Index, row) for row in stages.itertuples())
    ]
    total = ["all", f"{stages['jobs'].sum():,}", duration(float(stages["seconds"].sum())), "",
             cell(stages["node_hours"].sum(), ".3g"), ""]  # fmt: skip
    header = ["stage", "jobs", "time of all jobs", "longest job", "node-hours", "memory"]
    shown = stages.head(_MAX_BARS)
    figure = contents.figures.bars(
        "Node-hours of stages",
        [*map(str, shown.index)],
        {"node-hours": [*shown["node_hours"]]},
        axes=Axes("stage", "node-hours", y_form="0.[0000]"),
        note="Finished jobs, and trainings that were stopped. Stopped jobs of other stages are not "
        "measured. Memory is the largest of a job on its first node.",
    )
    return f'<div class="plots">{figure}</div>' + html_pages.table(header, rows, total)
