"""Metrics equal those of scikit-learn and scipy, and values by hand."""

import numpy as np
import pytest

from tokamake.finetune.metrics import METRICS, predictions, scores

GENERATOR = np.random.default_rng(3)
CLASSES = [GENERATOR.integers(0, 2, 41) for _ in range(2)]
NUMBERS = [np.round(GENERATOR.normal(size=41), 1) for _ in range(2)]  # with equal ones


def test_metrics_of_classes_equal_those_of_scikit_learn() -> None:
    theirs = pytest.importorskip("sklearn.metrics")
    predicted, labels = CLASSES
    for name, oracle in {
        "accuracy": theirs.accuracy_score,
        "f1": theirs.f1_score,
        "matthews": theirs.matthews_corrcoef,
    }.items():
        assert METRICS[name](predicted, labels) == pytest.approx(oracle(labels, predicted))


def test_correlations_equal_those_of_scipy() -> None:
    theirs = pytest.importorskip("scipy.stats")
    predicted, labels = NUMBERS
    for name, oracle in {"pearson": theirs.pearsonr, "spearman": theirs.spearmanr}.items():
        assert METRICS[name](predicted, labels) == pytest.approx(oracle(labels, predicted)[0])


def test_values_by_hand() -> None:
    predicted, labels = np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0])
    assert METRICS["accuracy"](predicted, labels) == 0.75
    assert METRICS["f1"](predicted, labels) == pytest.approx(2 / 3)
    assert METRICS["matthews"](predicted, labels) == pytest.approx(1 / np.sqrt(3))
    # Ranks 1, 2.5, 2.5 and 1, 2, 3.
    ranks = METRICS["spearman"](np.array([0.0, 5.0, 5.0]), np.array([1.0, 2.0, 9.0]))
    assert ranks == pytest.approx(np.sqrt(3) / 2)


def test_what_cannot_be_measured_is_0() -> None:
    same, labels = np.zeros(3, np.int64), np.array([0, 0, 1])
    for name in ("f1", "matthews", "pearson", "spearman"):
        assert METRICS[name](same, labels) == 0.0


def test_predictions_follow_from_logits() -> None:
    logits = np.array([[0.1, 2.0, 0.0], [3.0, 0.0, 0.0]], np.float32)
    assert predictions(logits, "classes").tolist() == [1, 0]
    assert predictions(logits, "choice").tolist() == [1, 0]
    assert predictions(logits[:, :1], "regression").tolist() == pytest.approx([0.1, 3.0])
    result = scores(logits, np.array([1, 1]), head="classes", names=("accuracy",))
    assert result == {"accuracy": 0.5}
