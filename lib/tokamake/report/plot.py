"""Stage `plot`: figures and tables of a finished run, in a folder that the report takes up."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot(
    *,
    metadata: Path,
    index: Path,
    metrics: Path,
    train: Path,
    evaluation: Path,
    earlier: Sequence[Path] = (),
    samples: Path,
    config: Path,
    output: Path,
) -> None:
    """Draw a run's curves and tables.

    Written are loss.svg, learning_rate.svg, throughput.svg, mixture.svg, lengths.svg, and as pages
    corpora.html, evaluation.html, samples.html, summary.html. The same inputs give the same bytes.

    Args:
        metadata: JSON file of `describe`, for what the corpora hold.
        index: folder of `index`.
        metrics: metrics.jsonl of `train`.
        train: train.json of `train`.
        evaluation: JSON file of `evaluate`.
        earlier: those of segments before the last, evaluate.STEP.json, in their order.
        samples: JSON file of `generate`.
        config: run.yaml of `resolve`.
        output: folder to write; an existing one is replaced.

    Raises:
        UserError: a file is missing or broken.
    """
    import math

    from tokamake.checkpoint import model_tensors
    from tokamake.config.resolved_run import read_run
    from tokamake.files import atomic_folder, read_json
    from tokamake.report import figures, style, tables
    from tokamake.report.length_figure import lengths
    from tokamake.report.metrics_history import read_history
    from tokamake.report.mixture import read_mixture

    run = read_run(config)
    history = read_history(metrics)
    corpora = read_mixture(metadata=metadata, index=index, run=run)
    trained = read_json(train, "make it with `tokamake train`")
    num_parameters = sum(map(math.prod, model_tensors.shapes(run.architecture).values()))
    before = {int(path.suffixes[0][1:]): _scores(path) for path in earlier}
    pages = {
        "summary": tables.summary(run, trained, num_parameters),
        "corpora": tables.corpora(corpora),
        "evaluation": tables.evaluation(_scores(evaluation), before),
        "samples": tables.samples(read_json(samples, "make it with `tokamake generate`")),
    }
    with style.styled(), atomic_folder(output) as folder:
        for name, page in pages.items():
            (folder / f"{name}.html").write_text(page, encoding="utf-8")
        drawn = {
            "loss": figures.loss(history, run.architecture.vocab_size or 1),
            "learning_rate": figures.learning_rate(history),
            "throughput": figures.throughput(history),
            "mixture": figures.mixture(corpora),
            "lengths": lengths(corpora, run.train.sequence_length),
        }
        for name, figure in drawn.items():
            style.save(figure, folder / f"{name}.svg")
    print(f"{output}: {len(drawn)} figures, {len(pages)} tables")


def _scores(path: Path) -> dict[str, Any]:
    from tokamake.files import read_json

    found: dict[str, Any] = read_json(path, "make it with `tokamake evaluate`")
    return found
