"""Labels of whole samples, which a head of the model predicts: classes, options or numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tokamake.config.finetune import FinetuneSettings
from tokamake.models.common.language_model import Predictions
from tokamake.parallel.loss import NO_LABEL
from tokamake.train.batch import HostBatch
from tokamake.train.objectives._base import Labels, Losses, ObjectiveBase
from tokamake.train.objectives.classification.epochs import TaskData, read_data
from tokamake.train.objectives.classification.rows import NO_CLASS, TaskRows


class Objective(ObjectiveBase):
    """Rows are `TaskRows`."""

    has_sample_labels = True

    @classmethod
    def read_data(cls, finetune: FinetuneSettings, tokenizer: Path, **options: Any) -> TaskData:
        return read_data(finetune, tokenizer, **options)

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
