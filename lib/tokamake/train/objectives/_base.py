"""An objective: how samples become micro batches, and model outputs become losses and metrics.

A loss is a sum over the labels of a micro batch. The back end divides it by their number in the
global batch, so ranks and micro batches can share the samples in any way.
Shape suffixes: B rows of a micro batch, each a sample unless samples share rows; L tokens of a row;
V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.models.common.language_model import Predictions
from tokamake.parallel.context import share
from tokamake.parallel.document_mask import keep_ids
from tokamake.parallel.loss import cross_entropy, num_right
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.train.batch import HostBatch, MicroBatch, to_device

KIND = "train/objectives/*/objective"
"""Kind of the plug-ins that are objectives."""
_CPU = torch.device("cpu")
_DOCUMENT_IDS = {"document_ids", "decoder_document_ids", "block_document_ids"}
"""Inputs of a model that keep documents or samples apart."""


class Labels(NamedTuple):
    """Labels of a micro batch."""

    tokens: Tensor
    """(B, L) or (N,) token ids, as in `MicroBatch`."""
    samples: Tensor | None = None
    """(samples,) class or number of each sample."""


class Losses(NamedTuple):
    """Sums of the losses of a micro batch, fp32 scalars."""

    tokens: Tensor
    """Loss of the tokens."""
    samples: Tensor | None = None
    """Loss of the samples as a whole; None: they have none."""
    num_samples: Tensor | None = None
    """Samples that have such a loss."""


class ObjectiveBase(ABC):
    """An objective of a run; all ranks have one.

    A back end calls `to_batch` for each micro batch of a step and `look_ahead` for all of them,
    then runs the model and calls `losses` for each one, in validation also `measure`.

    Attributes:
        metrics: names of the results of `measure`, in the records of validations.
        compares_samples: whether losses compare all samples of a step. Then validations take the
            micro batches of a step together, as training does.
    """

    metrics: tuple[str, ...] = ()
    compares_samples = False

    def __init__(self, run: Run, mesh: Mesh = SINGLE_RANK, *, device: torch.device = _CPU) -> None:
        self.run, self.mesh, self.device = run, mesh, device

    # ---- From samples to a micro batch ----

    @property
    def has_sample_labels(self) -> bool:
        """Whether samples have labels of their own, beside tokens."""
        return False

    @abstractmethod
    def collate(self, rows: Any) -> HostBatch:
        """Make a micro batch of samples, stacked as the loader does; the same on ranks that share
        a sequence."""

    def label_shape(self, rows: Any) -> tuple[int, int]:
        """Samples of a micro batch, and most labels of a sample, with or without a loss."""
        num_samples, length = self.collate(rows).labels.shape
        return num_samples, length

    def random_rows(self, generator: np.random.Generator) -> Any:  # noqa: ARG002
        """A micro batch of random tokens, for measurements of speed."""
        raise UserError(
            f"train.objective: {self.run.train.objective}: has no random samples; measure without "
            "--synthetic"
        )

    def to_batch(
        self, rows: Any, *, sample_numbers: npt.NDArray[np.int64] | None = None
    ) -> MicroBatch:
        """Bring this rank's part of a micro batch to the device.

        Args:
            sample_numbers: (B,) number of each sample in the run; None: nothing is dropped.
        """
        batch = self.collate(rows)

        def rank_tensor(array: npt.NDArray[Any]) -> Tensor:
            return share(to_device(array, self.device), axis=self.mesh.context)

        def whole(array: npt.NDArray[Any] | None) -> Tensor | None:
            return None if array is None else to_device(array, self.device)

        further = {name: rank_tensor(array) for name, array in batch.further_inputs.items()}
        if self.device.type != "cpu":
            for name in _DOCUMENT_IDS & further.keys():
                keep_ids(further[name], batch.further_inputs[name])
        if sample_numbers is not None and self.drops:
            further["sample_numbers"] = to_device(sample_numbers, self.device)
        return MicroBatch(
            rank_tensor(batch.inputs),
            rank_tensor(batch.labels),
            further,
            whole(batch.sample_labels),
            batch.num_sample_labels,
            whole(batch.label_numbers),
        )

    @property
    def num_sequences(self) -> int:
        """Sequences of a sample, to which dropout gives numbers of their own."""
        return 1

    @property
    def drops(self) -> bool:
        """Whether a training drops numbers, by the numbers of samples."""
        return any(self.run.train.dropout.rates)

    @property
    def needs_label_rows(self) -> bool:
        """Whether labels form (B, L) rows also where few tokens have one: losses of corpora need
        the loss of each row, and a pipeline needs equal shapes."""
        return self.run.train.log_corpus_losses or self.mesh.pipeline.size > 1

    # ---- From a micro batch to losses ----

    @property
    def counts_labels(self) -> bool:
        """Whether ranks count labels in each step, because some of `to_batch` have no loss."""
        return True

    def look_ahead(  # noqa: B027
        self, forward: Callable[[MicroBatch], Predictions], batches: Sequence[MicroBatch]
    ) -> None:
        """Look at all micro batches of a step before their losses; all ranks do so together.

        Args:
            forward: runs the model.
        """

    def losses(
        self, predicted: Predictions, labels: Labels, *, row_losses: list[Tensor] | None = None
    ) -> Losses:
        """Sums of the losses; for `row_losses` see `parallel.loss.cross_entropy`."""
        loss = cross_entropy(
            predicted.logits,
            labels.tokens,
            mesh=self.mesh,
            size=self._vocab_size,
            compiled=self.run.train.compile,
            row_losses=row_losses,
        )
        return Losses(loss)

    # ---- Validation ----

    def measure(self, predicted: Predictions, labels: Labels) -> Tensor:  # noqa: ARG002
        """(metrics, 2) fp32: sum of each metric over the labels of a micro batch, and number of
        these labels. The quotient of the sums over all micro batches is the metric."""
        return torch.zeros((0, 2), device=self.device)

    def num_right(self, predicted: Predictions, labels: Tensor) -> Tensor:
        """Labels of tokens that the model predicts, fp32."""
        return num_right(predicted.logits, labels, mesh=self.mesh, size=self._vocab_size)

    @property
    def _vocab_size(self) -> int:
        assert self.run.architecture.vocab_size is not None, "a resolved run has a vocabulary"
        return self.run.architecture.vocab_size


def objective_class(name: str) -> type[ObjectiveBase]:
    """Class of an objective."""
    objective: type[ObjectiveBase] = plugins.load(KIND, name).Objective
    return objective
