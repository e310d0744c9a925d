"""Sentinels replace spans of text in the encoder; the decoder restores the spans.

T5, arXiv 1910.10683.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokamake.config.resolved_run import sample_lengths
from tokamake.models.common.language_model import Predictions
from tokamake.parallel.loss import NO_LABEL
from tokamake.train.batch import HostBatch
from tokamake.train.objectives._base import Labels, ObjectiveBase
from tokamake.train.objectives._encoder_rows import labeled_batch
from tokamake.train.objectives.span_corruption.rows import SpanRows, span_rows


class Objective(ObjectiveBase):
    """Rows are records of the loader, or `SpanRows`."""

    metrics = ("token_accuracy",)

    def collate(self, rows: Any) -> HostBatch:
        """Hide padding; with `train.pack_samples`, samples share rows."""
        rows = _with_fields(rows)
        # Sequence parallelism divides the tokens of the decoder, too.
        multiple = self.mesh.tensor.size if self.mesh.sequence_parallel else 1
        is_packed = self.run.train.pack_samples
        inputs = rows.packed_inputs(multiple) if is_packed else rows.inputs(multiple)
        return labeled_batch(inputs, rows.labels, in_rows=self.needs_label_rows)

    def label_shape(self, rows: Any) -> tuple[int, int]:
        """Samples, and tokens of the decoder."""
        num_samples, length = _with_fields(rows).labels.shape
        return num_samples, length

    def random_rows(self, generator: np.random.Generator) -> SpanRows:
        """Random tokens of full samples."""
        size, vocab_size = self.run.train.micro_batch_size, self._vocab_size
        length, decoder_length = sample_lengths(self.run)
        rows = generator.integers(vocab_size, size=(size, decoder_length + 1))
        tokens = generator.integers(vocab_size, size=(size, length))
        return SpanRows(tokens, rows[:, :-1], rows[:, 1:], np.ones((size, length), np.bool_))

    def measure(self, predicted: Predictions, labels: Labels) -> Tensor:
        """Tokens of the decoder that the model predicts."""
        num_labels = (labels.tokens != NO_LABEL).sum()
        right = self.num_right(predicted, labels.tokens)
        return torch.stack((right, num_labels.float()))[None]


def _with_fields(rows: Any) -> SpanRows:
    return rows if isinstance(rows, SpanRows) else span_rows(rows)
