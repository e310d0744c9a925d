"""Stage `compare`: settings and results of finished runs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

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
    from tokamake.report.training_curves import read_history

    if len(runs) < 2:
        named = runs[0] if runs else "no run"
        raise UserError(f"{named}: nothing to compare with; give the folders of two or more runs")
    _check_finished(runs)
    histories = [read_history(folder / "training/metrics.jsonl") for folder in runs]
    page = _page(runs)
    with style.styled(), atomic_folder(output) as folder:
        (folder / "runs.html").write_text(page, encoding="utf-8")
        style.save(_losses([folder.name for folder in runs], histories), folder / "losses.svg")
    print(f"{output}: {len(runs)} runs")


def _check_finished(runs: tuple[Path, ...]) -> None:
    from tokamake.errors import UserError

    for folder in runs:
        if not folder.is_dir():
            names = sorted(path.parent.name for path in folder.parent.glob("*/evaluate.json"))
            finished = f"; finished runs in {folder.parent} are {', '.join(names)}"
            choices = finished if names else ""
            raise UserError(f"{folder}: no such run{choices}; fix the path")
        for name, stage in _FILES.items():
            if not (folder / name).is_file():
                raise UserError(
                    f"{folder}: not a finished run: there is no {name}, which `{stage}` writes; "
                    "finish the run, or name another"
                )


def _page(folders: tuple[Path, ...]) -> str:
    from tokamake import results
    from tokamake.report import html_pages

    settings = [_settings(folder) for folder in folders]
    keys = dict.fromkeys(key for values in settings for key in values)
    # Paths always differ between runs. A random checkpoint is only such a path.
    random = all(values.get("train.finetune") is None for values in settings)
    paths = {"run", "index", "output", *(["checkpoint"] if random else [])}
    differing = [
        key for key in keys if key not in paths and len({str(s.get(key)) for s in settings}) > 1
    ]
    rows = [
        [values["run"], *(_format(values.get(key)) for key in differing)] for values in settings
    ]
    header = ("run", "steps", "tokens", "training loss", "validation loss", "perplexity")
    finished = [*map(_result, results.runs(*folders).itertuples())]
    parts = [("", html_pages.table((*header, "bits per byte"), finished))]
    if differing:
        parts.append(("What differs", html_pages.table(("run", *differing), rows)))
    return html_pages.page("Runs", html_pages.sections(parts))


def _settings(folder: Path) -> dict[str, Any]:
    """Settings of a run, and the share of each corpus in its training samples."""
    from tokamake import results

    (settings,) = results.settings(folder).to_dict("records")
    shares = results.mixtures(folder)[["corpus", "share_of_samples"]].to_numpy()
    return settings | {f"share of {corpus}": f"{share:.1%}" for corpus, share in shares}


def _format(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _result(run: Any) -> list[str]:
    from tokamake.report.html_pages import cell

    losses, scores = (run.last_loss, run.validation_loss), (run.perplexity, run.bits_per_byte)
    return [
        run.run,
        *(cell(count, ",") for count in (run.step, run.consumed_tokens)),
        *(cell(loss, ".4f") for loss in losses),
        *(cell(score, ",.4f") for score in scores),
    ]


def _losses(names: list[str], histories: "list[pd.DataFrame]") -> "Figure":
    """Draw the losses of all runs over consumed tokens."""
    import numpy as np
    from matplotlib.ticker import EngFormatter

    from tokamake.report import style
    from tokamake.report.training_curves import measured, smooth

    validations = [measured(history, "validation_loss") for history in histories]
    common = set.intersection(*map(set, validations))
    split = min(common, default=None)  # "" is the validation split of the training data
    title = "Training loss" if split is None else "Validation loss"
    figure, axes = style.over_steps(title, height=max(4.8, 0.24 * len(names)))
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("nats per token")
    labels = []
    colors = (style.BLUE, *style.VALIDATION_COLORS)
    for number, (name, history) in enumerate(zip(names, histories, strict=True)):
        color = colors[number % len(colors)]
        if split is None:
            steps, losses = measured(history, "loss")[""]
            values = smooth(losses)
        else:
            steps, values = validations[number][split]
        # Validation steps need not be logged training steps.
        logged, consumed = measured(history, "consumed_tokens")[""]
        tokens = np.interp(steps, [0, *logged], [0, *consumed])
        axes.plot(tokens, values, "-o", color=color, linewidth=1.6, markersize=3.5)
        labels.append(style.Label(values[-1], f"{name} {values[-1]:.3f}", color))
    style.label_ends(axes, labels)
    return figure
