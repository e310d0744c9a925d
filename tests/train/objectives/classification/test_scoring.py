"""Metrics equal those of scikit-learn and scipy; each row counts once, on any number of ranks."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.finetunes import TASK, planted_rows, write_rows, write_vocabulary
from tests.support.ranks import spawn
from tokamake.config.finetune import FinetuneTask
from tokamake.parallel.axis import Axis
from tokamake.train.objectives._tasks import RowBatches, row_outputs
from tokamake.train.objectives.classification.rows import LabeledRows, TaskRows, read_rows
from tokamake.train.objectives.classification.scoring import METRICS, predictions, scores

NUM_ROWS = 11
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


def labeled_rows(folder: Path) -> LabeledRows:
    return read_rows(
        [str(folder / "rows.jsonl")],
        FinetuneTask(**TASK),
        tokenizer=folder / "vocab.txt",
        sequence_length=16,
    )


def logits_on_rank(folder: Path) -> tuple[np.ndarray, int]:
    """Logits that name the tokens of their rows, and the number of passes."""
    passes = []

    def forward(micro_batches: Iterable[TaskRows]) -> Iterator[Tensor]:
        for rows in micro_batches:
            passes.append(rows)
            # Padding is token 0, and the length of a batch must not matter.
            places = np.cumprod(np.full(rows.tokens.shape, 1.1), axis=1)
            values = (rows.tokens * places * rows.padding_mask).sum(-1)
            yield torch.from_numpy(np.stack([values, -values], axis=1))

    rows = labeled_rows(folder)
    axis = Axis(dist.get_rank(), dist.get_world_size())
    return row_outputs(forward, rows, batches=RowBatches(axis, size=2)), len(passes)


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_row_counts_once(tmp_path: Path, world_size: int) -> None:
    write_vocabulary(tmp_path)
    texts = planted_rows(NUM_ROWS + 1, 1)[:NUM_ROWS]
    texts[4]["text"] += " w1 w2"
    write_rows(tmp_path / "rows.jsonl", texts)
    results = spawn(logits_on_rank, world_size, tmp_path)
    rows = labeled_rows(tmp_path)
    batches = [rows.micro_batch(np.array([n]), 1, num_labels=1) for n in range(NUM_ROWS)]
    expected = [
        float((b.tokens * np.cumprod(np.full(b.tokens.shape, 1.1), axis=1) * b.padding_mask).sum())
        for b in batches
    ]
    for logits, num_passes in results:
        assert logits.shape == (NUM_ROWS, 2)
        np.testing.assert_allclose(logits[:, 0], expected, rtol=1e-6)
        assert num_passes == (6 if world_size == 1 else 2)
