"""Stage `compare`: settings and results of finished runs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tokamake.config.resolved_run import Run
    from tokamake.report.metrics_history import MetricsHistory


class FinishedRun(NamedTuple):
    """Files of a finished run."""

    run: "Run"
    history: "MetricsHistory"
    train_json: dict[str, Any]
    scores: dict[str, Any]
    """Overall scores of evaluate.json."""
    mixture: dict[str, str]
    """Share of each corpus in the training samples."""


_FILES = {"run.yaml": "resolve", "train.json": "train", "evaluate.json": "evaluate"}
"""Files of a finished run, with the stage that writes each."""


def compare(*runs: Path, output: Path) -> None:
    """Compare finished runs: a table of results and differences, runs.html, and losses, losses.svg.

    losses.svg shows the loss on a validation split that all runs have, or else the smoothed
    training loss. The same inputs give the same bytes.

    Args:
        runs: folders of two or more finished runs, for example results/NAME.
        output: folder to write; an existing one is replaced.
    """
    from tokamake.errors import UserError
    from tokamake.files import atomic_folder
    from tokamake.report import style

    if len(runs) < 2:
        named = runs[0] if runs else "no run"
        raise UserError(f"{named}: nothing to compare with; give the folders of two or more runs")
    _check_finished(runs)
    finished = [_read(folder) for folder in runs]
    with style.styled(), atomic_folder(output) as folder:
        (folder / "runs.html").write_text(_page(finished), encoding="utf-8")
        style.save(_losses(finished), folder / "losses.svg")
    print(f"{output}: {len(runs)} runs")


def _check_finished(runs: tuple[Path, ...]) -> None:
    from tokamake.errors import UserError

    for folder in runs:
        if not folder.is_dir():
            others = sorted(path.parent.name for path in folder.parent.glob("*/evaluate.json"))
            finished = f"; finished runs in {folder.parent} are {', '.join(others)}"
            choices = finished if others else ""
            raise UserError(f"{folder}: no such run{choices}; fix the path")
        for name, stage in _FILES.items():
            if not (folder / name).is_file():
                raise UserError(
                    f"{folder}: not a finished run: there is no {name}, which `{stage}` writes; "
                    "finish the run, or name another"
                )


def _read(folder: Path) -> FinishedRun:
    from tokamake.config.resolved_run import read_run
    from tokamake.files import read_json
    from tokamake.report.metrics_history import read_history

    run = read_run(folder / "run.yaml")
    index = read_json(run.index / "index.json", "make it with `tokamake index`")
    samples: dict[str, int] = {}
    for file in index["splits"]["train"]["files"]:
        samples[file["corpus"]] = samples.get(file["corpus"], 0) + file["drawn_samples"]
    return FinishedRun(
        run,
        read_history(folder / "training/metrics.jsonl"),
        read_json(folder / "train.json", "make it with `tokamake train`"),
        read_json(folder / "evaluate.json", "make it with `tokamake evaluate`")["overall"],
        {f"share of {name}": f"{n / sum(samples.values()):.1%}" for name, n in samples.items()},
    )


def _page(finished: list[FinishedRun]) -> str:
    from tokamake.config.fields import dotted
    from tokamake.report import html_pages

    settings = [dotted(run.run.model_dump(mode="json")) | run.mixture for run in finished]
    keys = dict.fromkeys(key for values in settings for key in values)
    # Paths always differ between runs. A random checkpoint is only such a path.
    random = all(run.run.train.finetune is None for run in finished)
    paths = {"run", "index", "output", *(["checkpoint"] if random else [])}
    differing = [
        key for key in keys if key not in paths and len({str(s.get(key)) for s in settings}) > 1
    ]
    rows = [
        [run.run.run, *(_format(values.get(key)) for key in differing)]
        for run, values in zip(finished, settings, strict=True)
    ]
    header = ("run", "steps", "tokens", "training loss", "validation loss", "perplexity")
    results = html_pages.table((*header, "bits per byte"), [_result(run) for run in finished])
    parts = [("", results), ("What differs", html_pages.table(("run", *differing), rows))]
    return html_pages.page("Runs", html_pages.sections(parts if differing else parts[:1]))


def _format(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _result(run: FinishedRun) -> list[str]:
    train, measurements = run.train_json, run.train_json["validation_losses"]
    validation = measurements[-1].get("validation_loss") if measurements else None
    scores = (run.scores["perplexity"], run.scores["bits_per_byte"])
    return [
        run.run.run,
        f"{train['step']:,}",
        f"{train['consumed_tokens']:,}",
        *("–" if loss is None else f"{loss:.4f}" for loss in (train["last_loss"], validation)),
        *("–" if score is None else f"{score:,.4f}" for score in scores),
    ]


def _losses(finished: list[FinishedRun]) -> "Figure":
    """Draw the losses of all runs over consumed tokens."""
    import numpy as np
    from matplotlib.ticker import EngFormatter

    from tokamake.report import style
    from tokamake.report.metrics_history import smooth

    common = set.intersection(*(set(run.history.validation) for run in finished))
    name = "valid" if "valid" in common else min(common, default=None)
    title = "Training loss" if name is None else "Validation loss"
    figure, axes = style.over_steps(title, height=max(4.8, 0.24 * len(finished)))
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("nats per token")
    labels = []
    colors = (style.BLUE, *style.VALIDATION_COLORS)
    for number, run in enumerate(finished):
        color = colors[number % len(colors)]
        if name is None:
            steps, values = run.history.training["step"], smooth(run.history.training["loss"])
        else:
            steps, values = run.history.validation[name]
        training = run.history.training
        # Validation steps need not be logged training steps.
        tokens = np.interp(steps, [0, *training["step"]], [0, *training["consumed_tokens"]])
        axes.plot(tokens, values, "-o", color=color, linewidth=1.6, markersize=3.5)
        labels.append(style.Label(values[-1], f"{run.run.run} {values[-1]:.3f}", color))
    style.label_ends(axes, labels)
    return figure
