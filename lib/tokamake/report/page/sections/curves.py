"""Metrics of training over steps, with starts, bad steps and phases."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from tokamake import results
from tokamake.config.objective import objective_data
from tokamake.report import html_pages
from tokamake.report.page import batch_documents
from tokamake.report.page.contents import PageContents
from tokamake.report.page.figures import PALE, Axes, Curve, color, dash, legend
from tokamake.report.page.series import Floats, measured, smooth
from tokamake.train import metrics

TITLE = "Training"
PLACE = 40

_EVENT = "#B3261E"
_MAX_CORPORA = 12
_MAX_LEGEND, _MAX_RAW = 6, 3
"""Runs with legends in each figure, and runs whose noisy metrics are drawn as they are."""
_NOISY = ("grad_norm", "tokens_per_second", "model_flops_per_second", "mfu")
_SMOOTH = "Running means over about a twentieth of the steps."
_ACCURACY_NAMES = {"token_accuracy": "tokens", "sample_accuracy": "order of sentences"}


_METRICS = {
    "Learning rate": (
        "learning_rate",
        Axes("step", "learning rate", y_form="%.3g", from_zero=True),
        1.0,
    ),
    "Batch size": ("batch_size", Axes("step", "samples of a step", from_zero=True), 1.0),
    "Gradient norm": ("grad_norm", Axes("step", "gradient norm"), 1.0),
    "Balance of experts": ("balance_loss", Axes("step", "balance loss (1: balanced)"), 1.0),
    "Busiest expert": (
        "busiest_expert",
        Axes("step", "times the mean load", from_zero=True),
        1.0,
    ),
    "Loss of further tokens (MTP)": ("mtp_loss", Axes("step", "nats per token"), 1.0),
    "Choices that experts drop": (
        "dropped_share",
        Axes("step", "share of the choices", y_form="0.0%", from_zero=True),
        1.0,
    ),
    "Entropy of routers": ("router_entropy", Axes("step", "nats", from_zero=True), 1.0),
    "Throughput": (
        "tokens_per_second",
        Axes("step", "tokens per second", y_form="0,0", from_zero=True, y_ticks="0[.]0a"),
        1.0,
    ),
    "Model FLOP/s of a rank": (
        "model_flops_per_second",
        Axes("step", "TFLOP/s", from_zero=True),
        1e-12,
    ),
    "Utilization of the devices (MFU)": (
        "mfu",
        Axes("step", "share of the peak", y_form="0.0%", from_zero=True),
        1.0,
    ),
    "Peak memory of rank 0": (
        "peak_memory_bytes",
        Axes("step", "GB", y_form="0.00", from_zero=True),
        1e-9,
    ),
}
"""Title → metric, axes, and unit of a value."""


def render(contents: PageContents) -> str:
    """Figures of all runs, each run with its colour, and a table of events."""
    if not contents.histories:
        return ""
    events = _events(contents)
    figures = [
        _loss(contents, events),
        _validation(contents),
        _by_corpus(contents),
        _accuracy(contents),
        *_simple(contents),
    ]
    names = [
        Curve(name, np.zeros(0), np.zeros(0), color(number), dash(number))
        for number, name in enumerate(contents.histories)
    ]
    shown = legend(names)
    if _has_legends(contents):
        shown = ""
    elif shown:
        shown = f'<p class="note">Hide or show a run in all figures of this section:</p>{shown}'
    return (
        f'{shown}<div class="plots">\n{"".join(figures)}</div>\n'
        + _event_table(events)
        + batch_documents.render(contents)
    )


def _colored(contents: PageContents) -> Iterator[tuple[str, pd.DataFrame, str, str]]:
    """Yield name, metrics, colour and dashes of each run."""
    for number, (name, history) in enumerate(contents.histories.items()):
        yield name, history, color(number), dash(number)


def _loss(contents: PageContents, events: pd.DataFrame) -> str:
    lines, is_single = [], len(contents.histories) == 1
    for name, history, shade, dashes in _colored(contents):
        steps, raw = measured(history, "loss").get("", (np.zeros(0), np.zeros(0)))
        if is_single and len(raw):
            lines.append(Curve("each logged step", steps, raw, PALE, width=1.0))
            lines.append(Curve("running mean", steps, smooth(raw), shade))
            splits = measured(history, "validation_loss").items()
            for number, (split, (at, loss)) in enumerate(splits, 1):
                title = f"validation {split}".strip()
                lines.append(Curve(title, at, loss, color(number), kind="both", width=1.5))
            lines += _uniform(contents, name, steps=steps)
        elif len(raw):
            lines.append(Curve(name, steps, smooth(raw), shade, dashes))
    marks = [
        _marks(rows, measured(contents.histories[run], "loss"))
        for run, rows in events.groupby("run")
        if run in contents.histories
    ]
    return contents.figures.curves(
        "Loss",
        [*lines, *filter(None, marks)],
        axes=Axes("step", "training loss", y_form="0.0000"),
        note="" if is_single else _SMOOTH,
        has_legend=_has_legends(contents),
    )


def _has_legends(contents: PageContents) -> bool:
    """Whether figures have legends of their own: many runs have one above all figures."""
    return len(contents.histories) <= _MAX_LEGEND


def _uniform(contents: PageContents, name: str, *, steps: Floats) -> Iterator[Curve]:
    run = contents.settings.get(name)
    if not run:
        return
    if loss := objective_data(run.train.objective).uniform_loss(run.train, run.architecture):
        ends = np.array([steps[0], steps[-1]])
        yield Curve("uniform guess", ends, np.full(2, loss), "#5F6670", "dashed", width=1.2)


def _marks(events: pd.DataFrame, losses: dict[str, tuple[Floats, Floats]]) -> Curve | None:
    """Triangles at the events of a run, on its curve."""
    if "" not in losses:
        return None
    steps, raw = losses[""]
    at = events["step"].to_numpy(float)
    notes = [f"{row.run}, step {row.step:,}: {row.event}" for row in events.itertuples()]
    return Curve("events", at, np.interp(at, steps, raw), _EVENT, kind="points", notes=notes)


def _validation(contents: PageContents) -> str:
    """Validation losses of all runs and splits; one run alone has them beside its loss."""
    if len(contents.histories) == 1:
        return ""
    lines = [
        Curve(name, steps, loss, shade, dashes if not number else "dotted", kind="both")
        for name, history, shade, dashes in _colored(contents)
        for number, (steps, loss) in enumerate(measured(history, "validation_loss").values())
    ]
    axes = Axes("step", "validation loss", y_form="0.0000")
    has_legend = _has_legends(contents)
    return contents.figures.curves("Validation loss", lines, axes=axes, has_legend=has_legend)


def _by_corpus(contents: PageContents) -> str:
    """Training losses of corpora, if they are recorded: a colour for each corpus of one run."""
    parts = []
    for name, history, _, _ in _colored(contents):
        corpora = measured(history, "loss")
        corpora.pop("", None)
        longest = sorted(corpora.items(), key=lambda item: (-len(item[1][0]), item[0]))
        lines = [
            Curve(corpus, steps, smooth(loss), color(number), dash(number))
            for number, (corpus, (steps, loss)) in enumerate(longest[:_MAX_CORPORA])
        ]
        of = f", run {name}" if len(contents.histories) > 1 else ""
        axes = Axes("step", "training loss", y_form="0.0000")
        parts.append(contents.figures.curves(f"Loss by corpus{of}", lines, axes=axes))
        if len(contents.histories) > 4:
            break
    return "".join(parts)


def _accuracy(contents: PageContents) -> str:
    """Shares of tokens, samples or blocks that encoders find in validations."""
    lines = []
    for name, history, shade, _ in _colored(contents):
        kinds = [column for column in history if "accuracy" in str(column) and "/" not in column]
        for number, kind in enumerate(kinds):
            key = kind.removeprefix("validation_")
            text = _ACCURACY_NAMES.get(key, key.replace(metrics.ACCURACY_AT, "in the top "))
            steps, shares = measured(history, kind)[""]
            title = text if len(contents.histories) == 1 else f"{name}: {text}"
            tint = color(number) if len(contents.histories) == 1 else shade
            lines.append(Curve(title, steps, shares, tint, dash(7 * number), kind="both"))
    axes = Axes("step", "share found", y_form="0.0%", from_zero=True)
    return contents.figures.curves("Accuracy in validation", lines, axes=axes)


def _simple(contents: PageContents) -> Iterator[str]:
    """Figures of one metric each."""
    for title, (key, axes, scale) in _METRICS.items():
        lines, is_noisy = [], key in _NOISY and len(contents.histories) > _MAX_RAW
        for name, history, shade, dashes in _colored(contents):
            steps, values = measured(history, key).get("", (np.zeros(0), np.zeros(0)))
            if key == "model_flops_per_second":
                values = values / _world_size(contents, name)
            values = smooth(values) if is_noisy and len(values) else values
            lines.append(Curve(name, steps, values * scale, shade, dashes))
        known = np.concatenate([line.y for line in lines])
        if not len(known) or (key == "batch_size" and len({*known}) == 1):
            continue
        is_steep = key == "grad_norm" and known.max() > 20 * np.median(known) > 0
        yield contents.figures.curves(
            title,
            lines,
            axes=axes._replace(y_log=is_steep),
            note=_SMOOTH if is_noisy else "",
            has_legend=_has_legends(contents),
        )


def _world_size(contents: PageContents, name: str) -> int:
    (known,) = contents.runs[contents.runs["run"] == name]["world_size"]
    ranks = contents.read(name, "training/durations.json") or {}
    return int(ranks.get("world_size", 1) if pd.isna(known) else known)


def _events(contents: PageContents) -> pd.DataFrame:
    """Starts, bad steps and phases: run, step, event, time."""
    rows = []
    for start in results.starts(*contents.folders.values()).itertuples():
        if start.is_planned:
            text = "the next segment starts, as planned"
        else:
            lost = f", after {start.lost_steps:,} lost steps" if start.lost_steps else ""
            text = f"restarted from the checkpoint{lost}"
        rows.append((start.run, start.step, text, f"{start.time:%Y-%m-%d %H:%M} UTC"))
    for name, run in contents.settings.items():
        if run.parent:
            rows.append((name, run.step, f"continues run {run.parent}", ""))
        rows += [(name, *event) for event in _bad_steps(contents, name)]
    columns = ["run", "step", "event", "time"]
    return pd.DataFrame(rows, columns=columns).sort_values(["run", "step"], kind="stable")


def _bad_steps(contents: PageContents, name: str) -> Iterator[tuple[int, str, str]]:
    records = metrics.read(contents.folders[name] / "training/events.jsonl")
    for event in records:
        kind = str(event.get("case", "bad step")).replace("_", " ")
        action, reason = event.get("action", ""), event.get("reason", "")
        yield event["step"], f"{kind}: {reason} ({action})", ""


def _event_table(events: pd.DataFrame) -> str:
    if events.empty:
        return ""
    rows = [[row.run, f"{row.step:,}", row.event, row.time] for row in events.itertuples()]
    table = html_pages.table(["run", "step", "event", "time"], rows)
    return html_pages.folded(f"Events: {len(rows):,} starts, spikes and phases", table)
