"""Stage `compare`: finished runs beside each other, what they differ in and what came of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tokamake.config.resolved_run import Run
    from tokamake.report.metrics_history import History


class FinishedRun(NamedTuple):
    """What a finished run left in its folder."""

    run: "Run"
    """Its settings."""
    history: "History"
    """Its losses."""
    trained: dict[str, Any]
    """Its train.json."""
    scores: dict[str, Any]
    """Scores over all held-out text, of its evaluate.json."""
    mixture: dict[str, str]
    """Shares of the corpora in its training samples."""


def compare(*runs: Path, output: Path) -> None:
    """Compare finished runs: a table of what differs, runs.html, and their losses, losses.svg.

    Validation losses are drawn, of the set that all runs were measured on; where there is none, the
    smoothed training losses. The same inputs give the same bytes.

    Args:
        runs: folders of two or more finished runs, as results/NAME.
        output: folder to write; an existing one is replaced.

    Raises:
        UserError: a file of a run is missing or broken, or there is one run only.
    """
    from tokamake.errors import UserError
    from tokamake.files import atomic_folder
    from tokamake.report import style

    if len(runs) < 2:
        raise UserError(f"compare: {len(runs)} run; give the folders of two or more")
    finished = [_read(folder) for folder in runs]
    with style.styled(), atomic_folder(output) as folder:
        (folder / "runs.html").write_text(_page(finished), encoding="utf-8")
        style.save(_losses(finished), folder / "losses.svg")
    print(f"{output}: {len(runs)} runs")


def _read(folder: Path) -> FinishedRun:
    from tokamake.config.resolved_run import read_run
    from tokamake.files import read_json
    from tokamake.report.metrics_history import read_history

    run = read_run(folder / "run.yaml")
    index = read_json(run.index / "index.json", "make it with `tokamake index`")
    drawn: dict[str, int] = {}
    for file in index["splits"]["train"]["files"]:
        drawn[file["corpus"]] = drawn.get(file["corpus"], 0) + file["drawn_samples"]
    return FinishedRun(
        run,
        read_history(folder / "training/metrics.jsonl"),
        read_json(folder / "train.json", "make it with `tokamake train`"),
        read_json(folder / "evaluate.json", "make it with `tokamake evaluate`")["overall"],
        {f"share of {name}": f"{n / sum(drawn.values()):.1%}" for name, n in drawn.items()},
    )


def _page(finished: list[FinishedRun]) -> str:
    from tokamake.report import html_pages

    settings = [_flat(each.run.model_dump(mode="json")) | each.mixture for each in finished]
    keys = dict.fromkeys(key for each in settings for key in each)
    random = all(each.run.train.finetune is None for each in finished)
    places = {"run", "index", "output", *(["checkpoint"] if random else [])}
    differing = [
        key for key in keys if key not in places and len({str(s.get(key)) for s in settings}) > 1
    ]
    rows = [
        [each.run.run, *(_shown(values.get(key)) for key in differing)]
        for each, values in zip(finished, settings, strict=True)
    ]
    header = ("run", "steps", "tokens", "training loss", "validation loss", "perplexity")
    results = html_pages.table((*header, "bits per byte"), [_result(each) for each in finished])
    parts = [("", results), ("What differs", html_pages.table(("run", *differing), rows))]
    return html_pages.page("Runs", html_pages.sections(parts if differing else parts[:1]))


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their names with dots."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found |= _flat(item, f"{prefix}{key}.")
        else:
            found[prefix + key] = item
    return found


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _result(each: FinishedRun) -> list[str]:
    trained, measured = each.trained, each.trained["validation_losses"]
    validation = measured[-1].get("validation_loss") if measured else None
    scores = (each.scores["perplexity"], each.scores["bits_per_byte"])
    return [
        each.run.run,
        f"{trained['step']:,}",
        f"{trained['consumed_tokens']:,}",
        *("–" if loss is None else f"{loss:.4f}" for loss in (trained["last_loss"], validation)),
        *("–" if score is None else f"{score:,.4f}" for score in scores),
    ]


def _losses(finished: list[FinishedRun]) -> "Figure":
    """Losses of all runs over the tokens that each has seen."""
    import numpy as np
    from matplotlib.ticker import EngFormatter

    from tokamake.report import style
    from tokamake.report.metrics_history import smooth

    common = set.intersection(*(set(each.history.validation) for each in finished))
    name = "valid" if "valid" in common else min(common, default=None)
    title = "Training loss" if name is None else "Validation loss"
    figure, axes = style.over_steps(title, height=max(4.8, 0.24 * len(finished)))
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("nats per token")
    labels = []
    colors = (style.BLUE, *style.VALIDATION_COLORS)
    for number, each in enumerate(finished):
        color = colors[number % len(colors)]
        if name is None:
            steps, values = each.history.training["step"], smooth(each.history.training["loss"])
        else:
            steps, values = each.history.validation[name]
        seen = each.history.training
        tokens = np.interp(steps, [0, *seen["step"]], [0, *seen["consumed_tokens"]])
        axes.plot(tokens, values, "-o", color=color, linewidth=1.6, markersize=3.5)
        labels.append(style.Label(values[-1], f"{each.run.run} {values[-1]:.3f}", color))
    style.label_ends(axes, labels)
    return figure
