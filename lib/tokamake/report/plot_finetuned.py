"""Stage `plot-finetuned`: the scores of a finetuned model, for the report."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_finetuned(*, scores: Path, evaluation: Path, output: Path) -> None:
    """Draw the scores of a finetuned model.

    The folder contains scores.svg, with the metrics and the training loss by epoch, and
    finetuning.html, with tables of epochs and of test sets. The same inputs give the same bytes.

    Args:
        scores: JSON file of `finetune`.
        evaluation: JSON file of `evaluate-finetuned`.
        output: folder to write; an existing one is replaced.
    """
    from tokamake.files import atomic_folder, read_json
    from tokamake.report import style

    results = read_json(scores, "make it with `tokamake finetune`")
    evaluated = read_json(evaluation, "make it with `tokamake evaluate-finetuned`")
    with style.styled(), atomic_folder(output) as folder:
        (folder / "finetuning.html").write_text(page(results, evaluated), encoding="utf-8")
        style.save(figure(results), folder / "scores.svg")
    print(f"{output}: 1 figure, 1 table")


def figure(results: dict[str, Any]) -> "Figure":
    """Draw each metric by epoch, with a mark at the best one, and the training loss below.

    Metrics that are no shares, such as an average rank, are in the tables alone.
    """
    from matplotlib.ticker import MaxNLocator

    from tokamake.report import style

    figure, axes = style.over_steps(f"Scores of {results['task']}", height=4.8)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:.0f}")
    epochs, labels = [record["epoch"] for record in results["epochs"]], []
    for number, metric in enumerate(results["metrics"]):
        color = (style.BLUE, *style.VALIDATION_COLORS)[number]
        values = [record["scores"][metric] for record in results["epochs"]]
        if max(map(abs, values)) > 1:
            continue
        axes.plot(epochs, values, "-o", color=color, linewidth=1.6, markersize=4)
        labels.append(style.Label(values[-1], f"{metric} {values[-1]:.4f}", color))
    losses = [record["train_loss"] for record in results["epochs"]]
    axes.plot(epochs, losses, "--", color=style.GREY, linewidth=1.2)
    labels.append(style.Label(losses[-1], f"training loss {losses[-1]:.3f}", style.MUTED))
    best = results["best"]
    best_score = best["scores"][results["metrics"][0]]
    axes.plot([best["epoch"]], [best_score], "o", color=style.ORANGE, markersize=9, zorder=0)
    style.label_ends(axes, labels)
    return figure


def page(results: dict[str, Any], evaluated: dict[str, Any]) -> str:
    """Tables of the run, of its epochs and of its test sets, as an HTML page."""
    from tokamake.report import html_pages

    best, metrics = results["best"], results["metrics"]
    rows = results["rows"]
    facts = html_pages.definitions(
        [
            ("task", results["task"]),
            ("pretrained model", results["pretrained"]),
            ("rows", f"{rows['train']:,} to train on, {rows['validation']:,} to validate on"),
            ("best epoch", f"{best['epoch']}, by {metrics[0]}"),
        ]
    )
    epochs = html_pages.table(
        ["epoch", "step", "training loss", *metrics],
        [
            [
                f"{record['epoch']}{' (best)' if record == best else ''}",
                f"{record['step']:,}",
                f"{record['train_loss']:.4f}",
                *(f"{record['scores'][metric]:.4f}" for metric in metrics),
            ]
            for record in results["epochs"]
        ],
    )
    sets = html_pages.table(
        ["test set", "rows", *metrics],
        [
            [
                name,
                f"{scores['rows']:,}",
                *(html_pages.cell(scores.get(metric), ".4f") for metric in metrics),
            ]
            for name, scores in evaluated["scores"].items()
        ],
    )
    parts = [("", facts), ("Epochs", epochs), ("Test sets", sets)]
    return html_pages.page(f"Finetuning on {results['task']}", html_pages.sections(parts))
