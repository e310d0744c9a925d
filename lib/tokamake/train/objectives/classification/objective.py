"""Labels of whole samples, which a head of the model predicts: classes, options or numbers."""

import numpy as np
import torch
from torch import Tensor

from tokamake.models.common.language_model import Predictions
from tokamake.parallel.loss import NO_LABEL
from tokamake.train.batch import HostBatch
from tokamake.train.objectives._base import Labels, Losses, ObjectiveBase
from tokamake.train.objectives.classification.rows import TaskRows, num_labeled, sum_of_losses


class Objective(ObjectiveBase):
    """Rows are `TaskRows`."""

    has_sample_labels = True

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
