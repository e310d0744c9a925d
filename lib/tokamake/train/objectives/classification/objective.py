"""Labels of whole samples, which a head of the model predicts: classes, options or numbers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from tokamake.config.finetune import FinetuneTask, TaskRun
from tokamake.models.common.language_model import Predictions
from tokamake.parallel.loss import NO_LABEL
from tokamake.train.batch import HostBatch
from tokamake.train.objectives._base import Labels, Losses
from tokamake.train.objectives._tasks import TaskObjective
from tokamake.train.objectives.classification.rows import (
    NO_CLASS,
    LabeledRows,
    TaskRows,
    read_rows,
)
from tokamake.train.objectives.classification.scoring import predictions, scores

_LABELED_SHARE = 0.8
"""Share of random rows that have a label; other rows fill up a step."""


class Objective(TaskObjective):
    """Rows are `TaskRows`."""

    has_sample_labels = True

    # ---- Rows of files, and their scores ----

    @classmethod
    def read_rows(
        cls, files: Iterable[str], task: FinetuneTask, *, tokenizer: Path, sequence_length: int
    ) -> LabeledRows:
        return read_rows(files, task, tokenizer=tokenizer, sequence_length=sequence_length)

    @staticmethod
    def sample_outputs(predicted: Predictions) -> Tensor:
        """(B, classes) logits."""
        assert predicted.sample_logits is not None, "the model has a head for samples"
        return predicted.sample_logits.float()

    @staticmethod
    def row_scores(
        outputs: npt.NDArray[np.float32], rows: LabeledRows, *, task: FinetuneTask
    ) -> dict[str, float]:
        return scores(outputs, rows.labels, head=task.head, names=task.metrics)

    @staticmethod
    def row_predictions(
        outputs: npt.NDArray[np.float32],
        rows: LabeledRows,  # noqa: ARG004
        *,
        task: FinetuneTask,
    ) -> list[dict[str, Any]]:
        """The label of each row, or its number."""
        predicted = predictions(outputs, task.head).tolist()
        labels = predicted if task.head == "regression" else [task.labels[n] for n in predicted]
        return [{"row": row, "prediction": label} for row, label in enumerate(labels)]

    # ---- From rows to losses ----

    @property
    def num_sequences(self) -> int:
        task = self._task
        return len(task.labels) if task.head == "choice" else 1

    @property
    def _task(self) -> FinetuneTask:
        assert isinstance(self.run, TaskRun)
        return self.run.task

    def random_rows(self, generator: np.random.Generator) -> TaskRows:
        """Random tokens of two texts; most rows have a label."""
        train, task = self.run.train, self._task
        shape = train.micro_batch_size * self.num_sequences, train.sequence_length
        tokens = generator.integers(self._vocab_size, size=shape)
        is_second = np.arange(shape[1]) >= generator.integers(shape[1], size=(shape[0], 1))
        types = is_second * int(self.run.architecture.setting("type_vocab_size") > 1)
        has_label = generator.random(train.micro_batch_size) < _LABELED_SHARE
        has_label[0] = True  # a step has a row with a label
        labels: npt.NDArray[Any]
        if task.head == "regression":
            numbers = generator.random(train.micro_batch_size)
            labels = np.where(has_label, numbers, np.nan).astype(np.float32)
        else:
            classes = generator.integers(len(task.labels), size=train.micro_batch_size)
            labels = np.where(has_label, classes, NO_CLASS)
        whole = np.ones(shape, np.bool_)
        return TaskRows(tokens, types, whole, labels, int(has_label.sum()))

    def collate(self, rows: TaskRows) -> HostBatch:
        """Hide padding; no token has a label."""
        no_labels = np.full((len(rows.tokens), 1), NO_LABEL)
        return HostBatch(rows.tokens, no_labels, rows.arrays(), rows.labels, rows.num_labels)

    def losses(
        self,
        predicted: Predictions,
        labels: Labels,
        *,
        row_losses: list[Tensor] | None = None,  # noqa: ARG002
    ) -> Losses:
        """Loss of samples alone."""
        none = torch.zeros((), device=self.device)
        if predicted.sample_logits is None or labels.samples is None:
            return Losses(none)
        loss = sum_of_losses(predicted.sample_logits, labels.samples)
        return Losses(none, loss, num_labeled(labels.samples))


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy, or squared error, of rows that have a label, fp32.

    Args:
        logits: (B, classes), (B × O, 1) of a choice, or (B, 1) of a regression.
        labels: (B,) int64 classes or options, or float32 numbers, see `TaskRows`.
    """
    logits = logits.float()
    if labels.is_floating_point():
        differences = torch.where(labels.isnan(), 0.0, logits[:, 0] - labels.nan_to_num())
        return differences.square().sum()
    by_row = logits.view(len(labels), -1)
    return F.cross_entropy(by_row, labels, ignore_index=NO_CLASS, reduction="sum")


def num_labeled(labels: Tensor) -> Tensor:
    """Number of rows that have a label, an fp32 scalar."""
    has_label = ~labels.isnan() if labels.is_floating_point() else labels != NO_CLASS
    return has_label.sum(dtype=torch.float32)
