"""Stage `plot`: figures and tables of a finished run, for the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def plot(
    *,
    metadata: Path,
    index: Path,
    metrics: Path,
    train: Path,
    evaluation: Path | None = None,
    earlier: Sequence[Path] = (),
    tasks: Sequence[Path] = (),
    samples: Path | None = None,
    config: Path,
    output: Path,
) -> None:
    """Draw the figures and tables of a run.

    The folder contains loss.svg, learning_rate.svg, throughput.svg, mixture.svg, lengths.svg, and
    the pages corpora.html, evaluation.html, samples.html, summary.html. The folder of an encoder
    has accuracy.svg in place of evaluation.html and samples.html. The same inputs give the same
    bytes.

    Args:
        metadata: JSON file of `describe`.
        index: folder of `index`.
        metrics: metrics.jsonl of `train`.
        train: train.json of `train`.
        evaluation: JSON file of `evaluate`. An encoder has none.
        earlier: evaluate.STEP.json of the segments before the last one, in order.
        tasks: TASK.json and TASK.STEP.json of `evaluate-task`, a task's segments in order.
        samples: JSON file of `generate`. An encoder has none.
        config: run.yaml of `resolve`.
        output: folder to write; an existing one is replaced.
    """
    import math

    from tokamake.checkpoint import model_tensors
    from tokamake.config.objective import objective_data
    from tokamake.config.resolved_run import read_run
    from tokamake.files import atomic_folder, read_json
    from tokamake.report import style, tables, training_curves
    from tokamake.report.length_figure import lengths
    from tokamake.results.corpora import read_mixture
    from tokamake.results.scores import read_scores

    run = read_run(config)
    history = training_curves.read_history(metrics)
    corpora = read_mixture(metadata=metadata, index=index, run=run)
    train_json = read_json(train, "make it with `tokamake train`")
    num_parameters = sum(map(math.prod, model_tensors.shapes(run.architecture).values()))
    segment_scores = {int(path.suffixes[0][1:]): read_scores(path) for path in earlier}
    pages = {
        "summary": tables.summary(
            run,
            train_json,
            num_parameters,
            best=best_checkpoint(history, Path(train_json["checkpoint"])),
        ),
        "corpora": tables.corpora(corpora),
    }
    if evaluation is not None:
        scores = read_scores(evaluation)
        pages["evaluation"] = tables.evaluation(scores, segment_scores, tasks=_tasks(tasks))
    if samples is not None:
        generated = read_json(samples, "make it with `tokamake generate`")
        pages["samples"] = tables.samples(generated)
    with style.styled(), atomic_folder(output) as folder:
        for name, page in pages.items():
            (folder / f"{name}.html").write_text(page, encoding="utf-8")
        drawings = {
            "loss": training_curves.loss_of_run(history, run),
            "learning_rate": training_curves.learning_rate(history),
            "throughput": training_curves.throughput(history),
            "mixture": training_curves.mixture(corpora),
            "lengths": lengths(corpora, run.train.sequence_length),
        }
        if not objective_data(run.train.objective).generates:
            drawings["accuracy"] = training_curves.accuracy(history)
        for name, figure in drawings.items():
            style.save(figure, folder / f"{name}.svg")
    print(f"{output}: {len(drawings)} figures, {len(pages)} tables")


def _tasks(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Scores of each task after each step; `last`: at the end."""
    from tokamake.results.scores import read_task

    tasks: dict[str, dict[str, Any]] = {}
    for path in paths:
        task, _, step = path.stem.partition(".")
        tasks.setdefault(task, {})[f"{int(step):,}" if step else "last"] = read_task(path)
    return tasks


def best_checkpoint(history: "pd.DataFrame", last: Path) -> Path:
    """The kept checkpoint with the lowest validation loss; `last` if none was validated."""
    import math

    from tokamake.report.training_curves import measured

    splits = measured(history, "validation_loss")
    steps, losses = splits.get("") or next(iter(splits.values()), ((), ()))
    loss_of = {
        last.with_name(f"global_step{int(step)}"): loss
        for step, loss in zip(steps, losses, strict=True)
        if math.isfinite(loss)
    }
    kept = [folder for folder in loss_of if folder.is_dir()]
    # If losses are equal, the later step counts.
    return min(reversed(kept), key=lambda folder: loss_of[folder], default=last)
