"""Runs compared: settings that differ, loss against compute, and sweeps over a setting."""

from typing import Any

import numpy as np
import pandas as pd

from tokamake import results
from tokamake.report import html_pages
from tokamake.report.html_pages import cell
from tokamake.report.page.contents import PageContents
from tokamake.report.page.figures import Axes, Curve, color, dash
from tokamake.report.page.series import measured, smooth

TITLE = "Comparison"
PLACE = 60

_MAX_COLUMNS = 6
"""With more runs, each run is a row instead of a column."""
_MAX_SWEEPS = 4
_PATHS = {"run", "index", "output", "tokenizer"}
"""Settings that differ between any two runs."""


def render(contents: PageContents) -> str:
    """Empty if there is one run."""
    if len(contents.folders) < 2:
        return ""
    differing = _differing(contents)
    figures = [_compute(contents), *_sweeps(contents, differing)]
    return html_pages.sections(
        [
            ("Settings that differ, and results", _table(contents, differing)),
            ("", f'<div class="plots">{"".join(figures)}</div>' if any(figures) else ""),
        ]
    )


def _differing(contents: PageContents) -> pd.DataFrame:
    """A row for each run, the columns are settings and shares of corpora that differ."""
    settings = results.settings(*contents.folders.values()).set_index("run", drop=False)
    shares = contents.mixtures.pivot(index="run", columns="corpus", values="share_of_samples")
    shares.columns = pd.Index([f"share of {corpus}" for corpus in shares.columns])
    settings = settings.join(shares.map(lambda share: _format(share, "{:.1%}")))
    # A random checkpoint is only a path that no other run has.
    random = settings["train.finetune"].isna().all() if "train.finetune" in settings else True
    hidden = _PATHS | ({"checkpoint"} if random else set())
    chosen = [
        name
        for name in settings
        if name not in hidden and settings[name].map(str).nunique(dropna=False) > 1
    ]
    return settings[chosen]


def _table(contents: PageContents, differing: pd.DataFrame) -> str:
    runs = contents.runs.set_index("run")
    outcomes = {
        "steps": [cell(value, ",") for value in runs["step"]],
        "training loss": [cell(value, ".4f") for value in runs["last_loss"]],
        "validation loss": [cell(value, ".4f") for value in runs["validation_loss"]],
        "perplexity": [cell(value, ",.2f") for value in runs["perplexity"]],
        "bits per byte": [cell(value, ".4f") for value in runs["bits_per_byte"]],
    }
    columns = {
        name: [_format(differing.loc[run, name]) for run in runs.index] for name in differing
    }
    columns |= outcomes
    if len(runs) <= _MAX_COLUMNS:
        rows = [[name, *values] for name, values in columns.items()]
        return html_pages.table(["", *runs.index], rows)
    rows = [
        [run, *(values[number] for values in columns.values())]
        for number, run in enumerate(runs.index)
    ]
    return html_pages.table(["run", *columns], rows)


def _format(value: Any, form: str = "{:g}") -> str:
    if isinstance(value, float):
        return "–" if value != value else form.format(value)
    return "–" if value is None else str(value)


def _compute(contents: PageContents) -> str:
    """Validation loss, or the running mean of the training loss, over FLOPs of the model."""
    histories = contents.histories
    splits = [measured(history, "validation_loss") for history in histories.values()]
    common = set.intersection(*map(set, splits)) if splits else set()
    split = min(common, default=None)
    lines = []
    for number, (name, history) in enumerate(histories.items()):
        flops = _flops(history)
        if flops is None:
            continue
        if split is None:
            steps, loss = measured(history, "loss").get("", (np.zeros(0), np.zeros(0)))
            loss = smooth(loss) if len(loss) else loss
        else:
            steps, loss = measured(history, "validation_loss")[split]
        spent = np.interp(steps, [0, *flops[0]], [0, *flops[1]])
        after = spent > 0
        kind = "line" if split is None else "both"
        lines.append(Curve(name, spent[after], loss[after], color(number), dash(number), kind=kind))
    title = "Training loss against compute" if split is None else "Validation loss against compute"
    axes = Axes("FLOPs of the model", "loss", x_log=True, y_form="0.0000")
    return contents.figures.curves(title, lines, axes=axes)


def _flops(history: pd.DataFrame) -> tuple[Any, Any] | None:
    """Steps, and operations of the model up to each."""
    needed = ["model_flops_per_second", "tokens_per_second", "consumed_tokens"]
    if any(name not in history for name in needed):
        return None
    known = history[["step", *needed]].dropna()
    flops_per_token = known["model_flops_per_second"] / known["tokens_per_second"]
    spent = flops_per_token * known["consumed_tokens"]
    return known["step"].to_numpy(float), spent.to_numpy(float)


def _sweeps(contents: PageContents, differing: pd.DataFrame) -> list[str]:
    """The final loss over each setting that is a number and has three values or more."""
    runs = contents.runs.set_index("run")
    measure = "validation_loss" if runs["validation_loss"].notna().any() else "last_loss"
    figures = []
    for name in differing:
        values = pd.to_numeric(differing[name], errors="coerce")
        loss = runs[measure].astype(float)
        known = values.notna() & loss.notna()
        if name == "seed" or values[known].nunique() < 3:
            continue
        values, loss = values[known].sort_values(), loss[known]
        low, high = values.min(), values.max()
        axes = Axes(str(name), measure.replace("_", " "), x_log=bool(low > 0 and high > 8 * low))
        notes = [f"{run}: {values[run]:g}, {loss[run]:.4f}" for run in values.index]
        x, y = values.to_numpy(float), loss[values.index].to_numpy(float)
        lines = [Curve("runs", x, y, color(0), kind="both", notes=notes)]
        figures.append(contents.figures.curves(f"Sweep over {name}", lines, axes=axes))
    return figures[:_MAX_SWEEPS]
