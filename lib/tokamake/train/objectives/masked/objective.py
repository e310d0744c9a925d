"""Masked tokens are restored from both sides; with two parts, also their order is learned.

BERT, arXiv 1810.04805; the order of sentences, arXiv 1909.11942.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tokamake.models.common.language_model import Predictions
from tokamake.parallel.loss import NO_LABEL
from tokamake.train.batch import HostBatch
from tokamake.train.objectives._base import Labels, Losses, ObjectiveBase
from tokamake.train.objectives._encoder_rows import labeled_batch
from tokamake.train.objectives.masked.rows import MaskedRows, masked_rows


class Objective(ObjectiveBase):
    """Rows are records of the loader, or `MaskedRows`."""

    metrics = ("token_accuracy", "sample_accuracy")

    @property
    def has_sample_labels(self) -> bool:
        """Whether the model has a head for the order of sentences; `check_model` compares both."""
        return self.run.train.masking.sentence_order

    def collate(self, rows: Any) -> HostBatch:
        """Hide padding; with `train.pack_samples`, samples share rows."""
        rows = _with_fields(rows)
        inputs = rows.packed_inputs() if self.run.train.pack_samples else rows.inputs()
        batch = labeled_batch(inputs, rows.labels, in_rows=self.needs_label_rows)
        return batch._replace(sample_labels=rows.is_random if self.has_sample_labels else None)

    def label_shape(self, rows: Any) -> tuple[int, int]:
        """Samples and tokens."""
        num_samples, length = _with_fields(rows).labels.shape
        return num_samples, length

    def random_rows(self, generator: np.random.Generator) -> MaskedRows:
        """Random tokens of full samples."""
        train = self.run.train
        shape = train.micro_batch_size, train.sequence_length
        tokens = generator.integers(self._vocab_size, size=shape)
        is_masked = generator.random(shape) < train.masking.probability
        labels, whole = np.where(is_masked, tokens, NO_LABEL), np.ones(shape, np.bool_)
        orders = generator.integers(2, size=len(tokens))
        return MaskedRows(tokens, np.zeros_like(tokens), labels, whole, orders)

    def losses(
        self, predicted: Predictions, labels: Labels, *, row_losses: list[Tensor] | None = None
    ) -> Losses:
        """Loss of masked tokens, and of the order of samples if the model has a head for it."""
        losses = super().losses(predicted, labels, row_losses=row_losses)
        logits, orders = predicted.sample_logits, labels.samples
        if logits is None or orders is None:
            return losses
        of_orders = F.cross_entropy(logits.float(), orders, reduction="sum")
        return Losses(losses.tokens, of_orders, _number(orders))

    def measure(self, predicted: Predictions, labels: Labels) -> Tensor:
        """Masked tokens, and orders, that the model predicts."""
        num_labels = (labels.tokens != NO_LABEL).sum().float()
        tokens = torch.stack((self.num_right(predicted, labels.tokens), num_labels))
        logits, orders = predicted.sample_logits, labels.samples
        if logits is None or orders is None:
            return torch.stack((tokens, torch.zeros_like(tokens)))
        num_right = (logits.argmax(-1) == orders).sum().float()
        return torch.stack((tokens, torch.stack((num_right, _number(orders)))))


def _number(labels: Tensor) -> Tensor:
    return torch.full((), float(len(labels)), device=labels.device)


def _with_fields(rows: Any) -> MaskedRows:
    return rows if isinstance(rows, MaskedRows) else masked_rows(rows)
