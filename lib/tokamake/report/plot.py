"""Stage `plot`: figures and tables of a finished run, for the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
    from tokamake.config.resolved_run import read_run
    from tokamake.files import atomic_folder, read_json
    from tokamake.report import style, tables, training_curves
    from tokamake.report.length_figure import lengths
    from tokamake.report.metrics_history import best_checkpoint, read_history
    from tokamake.report.mixture import read_mixture

    run = read_run(config)
    history = read_history(metrics)
    corpora = read_mixture(metadata=metadata, index=index, run=run)
    train_json = read_json(train, "make it with `tokamake train`")
    num_parameters = sum(map(math.prod, model_tensors.shapes(run.architecture).values()))
    segment_scores = {int(path.suffixes[0][1:]): _scores(path) for path in earlier}
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
        scores = _scores(evaluation)
        pages["evaluation"] = tables.evaluation(scores, segment_scores, tasks=_tasks(tasks))
    if samples is not None:
        generated = read_json(samples, "make it with `tokamake generate`")
        pages["samples"] = tables.samples(generated)
    with style.styled(), atomic_folder(output) as folder:
        for name, page in pages.items():
            (folder / f"{name}.html").write_text(page, encoding="utf-8")
        drawings = {
            "loss": training_curves.loss(history, run.architecture.vocab_size or 1),
            "learning_rate": training_curves.learning_rate(history),
            "throughput": training_curves.throughput(history),
            "mixture": training_curves.mixture(corpora),
            "lengths": lengths(corpora, run.train.sequence_length),
        }
        if run.train.objective != "causal":
            drawings["accuracy"] = training_curves.accuracy(history)
        for name, figure in drawings.items():
            style.save(figure, folder / f"{name}.svg")
    print(f"{output}: {len(drawings)} figures, {len(pages)} tables")


def _tasks(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Scores of each task after each step; `last`: at the end."""
    from tokamake.files import read_json

    tasks: dict[str, dict[str, Any]] = {}
    for path in paths:
        task, _, step = path.stem.partition(".")
        read = read_json(path, "make it with `tokamake evaluate-task`")
        tasks.setdefault(task, {})[f"{int(step):,}" if step else "last"] = read["scores"]
    return tasks


def _scores(path: Path) -> dict[str, Any]:
    from tokamake.files import read_json

    scores: dict[str, Any] = read_json(path, "make it with `tokamake evaluate`")
    return scores
