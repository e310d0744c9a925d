"""Finetuned models: scores of each epoch, and of test sets."""

from html import escape
from typing import Any

import numpy as np

from tokamake.report import html_pages
from tokamake.report.page.contents import PageContents
from tokamake.report.page.figures import Axes, Curve, color

TITLE = "Finetuning"
PLACE = 52


def render(contents: PageContents) -> str:
    """For each run with finetune.json: a figure of its scores, tables of epochs and test sets."""
    parts = []
    for run in contents.folders:
        scores = contents.read(run, "finetune.json")
        if scores:
            evaluated = contents.read(run, "evaluate_finetuned.json") or {"scores": {}}
            parts.append(f"<h3>{escape(run)}: {escape(scores['task'])}</h3>")
            parts += [_facts(scores), _figure(contents, run, scores=scores)]
            parts.append(_epochs(scores) + _test_sets(scores["metrics"], evaluated["scores"]))
    return "\n".join(parts)


def _facts(scores: dict[str, Any]) -> str:
    rows, best = scores["rows"], scores["best"]
    return html_pages.definitions(
        [
            ("pretrained model", scores["pretrained"]),
            ("rows", f"{rows['train']:,} to train on, {rows['validation']:,} to validate on"),
            ("best epoch", f"{best['epoch']}, by {scores['metrics'][0]}"),
        ]
    )


def _figure(contents: PageContents, run: str, *, scores: dict[str, Any]) -> str:
    """Shares such as an accuracy by epoch; other metrics are in the table alone."""
    epochs = np.array([record["epoch"] for record in scores["epochs"]], float)
    lines = []
    for number, metric in enumerate(scores["metrics"]):
        values = np.array([record["scores"][metric] for record in scores["epochs"]], float)
        if np.abs(values).max() <= 1:
            lines.append(Curve(metric, epochs, values, color(number), kind="both"))
    losses = np.array([record["train_loss"] for record in scores["epochs"]], float)
    figures = [
        contents.figures.curves(
            f"Scores of {run}", lines, axes=Axes("epoch", "score in validation", y_form="0.0000")
        ),
        contents.figures.curves(
            f"Training loss of {run}",
            [Curve("training loss", epochs, losses, color(6), kind="both")],
            axes=Axes("epoch", "training loss", y_form="0.0000"),
        ),
    ]
    return f'<div class="plots">{"".join(figures)}</div>'


def _epochs(scores: dict[str, Any]) -> str:
    rows = [
        [
            f"{record['epoch']}{' (best)' if record == scores['best'] else ''}",
            f"{record['step']:,}",
            f"{record['train_loss']:.4f}",
            *(f"{record['scores'][metric]:.4f}" for metric in scores["metrics"]),
        ]
        for record in scores["epochs"]
    ]
    return html_pages.table(["epoch", "step", "training loss", *scores["metrics"]], rows)


def _test_sets(metrics: list[str], evaluated: dict[str, Any]) -> str:
    if not evaluated:
        return ""
    rows = [
        [name, f"{own['rows']:,}", *(html_pages.cell(own.get(metric), ".4f") for metric in metrics)]
        for name, own in evaluated.items()
    ]
    return html_pages.table(["test set", "rows", *metrics], rows)
