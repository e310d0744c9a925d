"""Metrics of a task over the logits of all its rows; greater is better.

GLUE (arXiv 1804.07461) names the metrics of its tasks. N is the number of rows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

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
