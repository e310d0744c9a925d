"""Logits of a task's rows, and its metrics over all rows; greater is better.

GLUE (arXiv 1804.07461) names the metrics of its tasks. N is the number of rows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from tokamake.parallel.axis import SINGLE_RANK_AXIS, Axis
from tokamake.train.objectives.classification.rows import LabeledRows, TaskRows

Numbers = npt.NDArray[Any]
"""Classes in int64, or floating-point numbers."""


def accuracy(predicted_N: Numbers, labels_N: Numbers) -> float:
    """Share of the rows whose class is predicted."""
    return float(np.mean(predicted_N == labels_N))


def f1(predicted_N: Numbers, labels_N: Numbers) -> float:
    """Harmonic mean of precision and recall of class 1; 0 without predictions and labels of it."""
    both = float(np.sum((predicted_N == 1) & (labels_N == 1)))
    either = float(np.sum(predicted_N == 1) + np.sum(labels_N == 1))
    return 2 * both / either if either else 0.0


def pearson(predicted_N: Numbers, labels_N: Numbers) -> float:
    """Correlation of numbers; 0 if predictions or labels are all equal."""
    numbers = [np.asarray(x, np.float64) for x in (predicted_N, labels_N)]
    if any(np.ptp(x) == 0 for x in numbers):  # the rounding error of a mean is no variation
        return 0.0
    deviations = [x - x.mean() for x in numbers]
    product = float(np.sum(deviations[0] * deviations[1]))
    norms = [float(np.sqrt(np.sum(x * x))) for x in deviations]
    return product / (norms[0] * norms[1])


def spearman(predicted_N: Numbers, labels_N: Numbers) -> float:
    """Correlation of ranks; equal numbers share the mean of their ranks."""
    return pearson(_ranks(predicted_N), _ranks(labels_N))


def matthews(predicted_N: Numbers, labels_N: Numbers) -> float:
    """Matthews correlation of two classes: Pearson correlation of 0/1 labels."""
    return pearson((predicted_N == 1).astype(np.int64), (labels_N == 1).astype(np.int64))


def _ranks(values_N: Numbers) -> npt.NDArray[np.float64]:
    _, places, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (last - (counts - 1) / 2)[places.reshape(-1)]
    return ranks


METRICS: dict[str, Callable[[Numbers, Numbers], float]] = {
    each.__name__: each for each in (accuracy, f1, pearson, spearman, matthews)
}
"""Metrics by the names that tasks use."""


def predictions(logits: npt.NDArray[np.float32], head: str) -> Numbers:
    """Most likely classes or options of (N, classes) logits; a regression's (N, 1) numbers."""
    if head == "regression":
        numbers: npt.NDArray[np.float64] = logits[:, 0].astype(np.float64)
        return numbers
    classes: npt.NDArray[np.int64] = logits.argmax(-1)
    return classes


def scores(
    logits: npt.NDArray[np.float32], labels_N: Numbers, *, head: str, names: tuple[str, ...]
) -> dict[str, float]:
    """Values of metrics by their names; the arguments are as above."""
    predicted_N = predictions(logits, head)
    return {name: METRICS[name](predicted_N, labels_N) for name in names}


# ---- Logits: ranks share the rows, and each row counts once ----

Forward = Callable[[Iterable[TaskRows]], Iterator[Tensor]]
"""Micro batches → logits of each. All ranks have the same number of micro batches."""


class RowBatches(NamedTuple):
    """How rows are divided into micro batches."""

    axis: Axis = SINGLE_RANK_AXIS
    """Ranks that share the rows."""
    size: int = 32
    """Rows of a micro batch."""
    multiple: int = 8
    """Lengths of sequences are multiples of this."""


def row_logits(
    forward: Forward, rows: LabeledRows, *, batches: RowBatches
) -> npt.NDArray[np.float32]:
    """Return (N, classes or options) fp32 logits, on all ranks of the process group.

    Ranks with fewer rows fill up their micro batches; the result leaves these rows out.
    """
    axis, size = batches.axis, batches.size
    order = rows.by_length
    own = order[axis.rank :: axis.size]
    # Ranks that gather weights do so together.
    num_batches = -(-len(order[:: axis.size]) // size)
    chosen = [own[n * size : (n + 1) * size] for n in range(num_batches)]
    micro_batches = (
        rows.micro_batch(numbers, size, num_labels=len(rows), multiple=batches.multiple)
        for numbers in chosen
    )
    parts = [
        logits.reshape(size, -1)[: len(numbers)].float().cpu().numpy()
        for numbers, logits in zip(chosen, forward(micro_batches), strict=True)
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, np.concatenate(parts)))
    width = gathered[0][1].shape[1]
    result = np.full((len(rows), width), np.nan, np.float32)
    for numbers, values in gathered:
        result[numbers] = values
    return result
