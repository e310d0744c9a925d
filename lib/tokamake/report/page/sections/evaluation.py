"""Scores of held-out documents and tasks, over checkpoints."""

import math
from collections.abc import Mapping

import pandas as pd

from tokamake.data.corpus.splits import FEWEST_DOCUMENTS, FEWEST_TOKENS
from tokamake.report import html_pages
from tokamake.report.page.contents import PageContents
from tokamake.report.page.figures import Axes, Curve, color, dash
from tokamake.results.scores import HELD_OUT

TITLE = "Evaluation"
PLACE = 50

_COUNTS = {"documents": ",.0f", "tokens": ",.0f", "bytes": ",.0f"}
_MEASURES = {"loss": ".4f", "perplexity": ",.2f", "bits_per_byte": ".4f"}
_MAX_CORPORA = 8


def render(contents: PageContents) -> str:
    """Table of the last scores of each run, warnings, and scores over checkpoints."""
    scores = contents.evaluations
    held_out, tasks = scores[scores["task"] == HELD_OUT], scores[scores["task"] != HELD_OUT]
    parts = []
    if len(held_out):
        last = held_out[held_out.groupby("run")["step"].transform("max") == held_out["step"]]
        last = last if len(last) else held_out
        parts += [("Held-out documents", _warnings(last) + _table(last))]
        parts.append(("", f'<div class="plots">{_over_steps(contents, held_out)}</div>'))
    if len(tasks):
        parts.append(("Tasks", _tasks(tasks) + _task_figures(contents, tasks)))
    return html_pages.sections(parts)


def _table(scores: pd.DataFrame) -> str:
    """A row for each corpus of one run; with several runs, a row for each run."""
    runs = scores.groupby("run", sort=False)
    if runs.ngroups == 1:
        rows = [
            [subset, *_cells(measures, _COUNTS), *_cells(measures, _MEASURES)]
            for subset, measures in _by_subset(scores).items()
        ]
        return html_pages.table(["corpus", *map(_title, (*_COUNTS, *_MEASURES))], rows)
    subsets = [*dict.fromkeys(scores[scores["subset"] != "overall"]["subset"])][:_MAX_CORPORA]
    rows = []
    for run, own in runs:
        measures = _by_subset(own)
        corpora = [measures.get(subset, {}) for subset in subsets]
        bits = [_cells(each, {"bits_per_byte": ".4f"})[0] for each in corpora]
        overall = measures.get("overall", {})
        rows.append([str(run), *_cells(overall, _COUNTS), *_cells(overall, _MEASURES), *bits])
    header = ["run", *map(_title, (*_COUNTS, *_MEASURES)), *(f"{name}: bits" for name in subsets)]
    return html_pages.table(header, rows)


def _by_subset(scores: pd.DataFrame) -> dict[str, dict[str, float]]:
    return {
        str(subset): dict(zip(rows["metric"], rows["value"], strict=True))
        for subset, rows in scores.groupby("subset", sort=False)
    }


def _cells(measures: Mapping[str, float], forms: Mapping[str, str]) -> list[str]:
    return [html_pages.cell(measures.get(name), form) for name, form in forms.items()]


def _title(name: str) -> str:
    return name.replace("_", " ")


def _warnings(scores: pd.DataFrame) -> str:
    """Name the test sets that are too small to mean anything."""
    small = {}
    for (subset,), rows in scores.groupby(["subset"], sort=False):
        counts = dict(zip(rows["metric"], rows["value"], strict=True))
        documents, tokens = counts.get("documents", math.inf), counts.get("tokens", math.inf)
        if documents < FEWEST_DOCUMENTS or tokens < FEWEST_TOKENS:
            small[subset] = f"{subset} ({documents:,.0f} documents, {tokens:,.0f} tokens)"
    if not small:
        return ""
    return html_pages.warning(
        f"Too few held-out documents to compare models by: {', '.join(small.values())}. Two "
        f"models may differ by chance. Give at least {FEWEST_DOCUMENTS} documents and "
        f"{FEWEST_TOKENS:,} tokens: a larger share in train.split, or more text."
    )


def _over_steps(contents: PageContents, scores: pd.DataFrame) -> str:
    """Bits per byte, or the loss, of each run and corpus over checkpoints."""
    metric = "bits_per_byte" if (scores["metric"] == "bits_per_byte").any() else "loss"
    chosen = scores[(scores["metric"] == metric) & scores["step"].notna()]
    if chosen["step"].nunique() < 2:
        return ""
    runs = [*chosen["run"].unique()]
    if len(runs) > 1:
        chosen = chosen[chosen["subset"] == "overall"]
    lines = [
        Curve(
            str(run if len(runs) > 1 else subset),
            rows["step"].to_numpy(float),
            rows["value"].to_numpy(float),
            color(number),
            dash(number),
            kind="both",
        )
        for number, ((run, subset), rows) in enumerate(
            chosen.sort_values("step").groupby(["run", "subset"], sort=False)
        )
    ]
    axes = Axes("step", metric.replace("_", " "), y_form="0.0000")
    return contents.figures.curves("Held-out documents over checkpoints", lines, axes=axes)


def _tasks(scores: pd.DataFrame) -> str:
    """A row for each run, task and metric, a column for each step."""
    steps = [None if pd.isna(step) else int(step) for step in scores["step"].unique()]
    steps = sorted(steps, key=lambda step: (step is None, step or 0))
    rows = []
    for (run, task, subset, metric), own in scores.groupby(
        ["run", "task", "subset", "metric"], sort=False
    ):
        known = {
            None if pd.isna(step) else int(step): value
            for step, value in zip(own["step"], own["value"], strict=True)
        }
        name = f"{task} {subset}" if subset != "overall" else task
        cells = [_number(known.get(step)) for step in steps]
        rows.append([str(name), str(metric), str(run), *cells])
    header = [
        "task",
        "metric",
        "run",
        *("last" if step is None else f"step {step:,}" for step in steps),
    ]
    return html_pages.table(header, rows)


def _number(value: float | None) -> str:
    if value is None or pd.isna(value):
        return "–"
    return f"{value:,.0f}" if value == int(value) and abs(value) > 1 else f"{value:,.4f}"


def _task_figures(contents: PageContents, scores: pd.DataFrame) -> str:
    """Accuracies over checkpoints, a line for each run and task."""
    chosen = scores[scores["metric"].str.startswith("acc") & scores["step"].notna()]
    if chosen["step"].nunique() < 2:
        return ""
    lines = [
        Curve(" ".join(map(str, key)), rows["step"].to_numpy(float), rows["value"].to_numpy(float),
             color(number), dash(number), kind="both")
        for number, (key, rows) in enumerate(
            chosen.sort_values("step").groupby(["run", "task", "metric"], sort=False)
        )
    ]  # fmt: skip
    axes = Axes("step", "share", y_form="0.0%", from_zero=True)
    figure = contents.figures.curves("Tasks over checkpoints", lines, axes=axes)
    return f'<div class="plots">{figure}</div>'
