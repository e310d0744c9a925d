"""Epochs of finetuning: the order of rows, and what has been measured.

The order follows from the seed and the number of the epoch alone, so a run continues anywhere.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import files
from tokamake.config.training import TrainSettings
from tokamake.data.samples.loader import StepBatch
from tokamake.errors import UserError
from tokamake.finetune.rows import LabeledRows
from tokamake.parallel.mesh import Mesh

FILE = "finetune.json"
"""File in the folder of a checkpoint, with the history until there."""


class EpochRecord(NamedTuple):
    """An epoch that has ended."""

    epoch: int
    """From 1."""
    step: int
    """Finished steps."""
    train_loss: float
    """Mean over the rows of the epoch, each before its step."""
    scores: dict[str, float]
    """Scores on the validation files, by metric."""


class History(NamedTuple):
    """Measurements of a run until a step."""

    epochs: tuple[EpochRecord, ...] = ()
    loss_sum: float = 0.0
    """Sum of the losses of the rows of the present epoch."""
    num_rows: int = 0
    """Rows of the present epoch that have been trained on."""

    def after_step(self, loss: float, num_rows: int) -> "History":
        """The history after one more step with a mean `loss` of `num_rows` rows."""
        total = self.loss_sum + loss * num_rows
        return self._replace(loss_sum=total, num_rows=self.num_rows + num_rows)

    def after_epoch(self, step: int, scores: dict[str, float]) -> "History":
        """The history after the end of an epoch."""
        loss = self.loss_sum / max(1, self.num_rows)
        record = EpochRecord(len(self.epochs) + 1, step, loss, scores)
        return History((*self.epochs, record))

    def best(self, metric: str) -> EpochRecord | None:
        """The epoch with the best score; the first of several."""
        return max(self.epochs, key=lambda record: record.scores[metric], default=None)

    def to_json(self) -> dict[str, Any]:
        """Content of `FILE`."""
        return {**self._asdict(), "epochs": [record._asdict() for record in self.epochs]}


def read_history(folder: Path) -> History:
    """Read the history in the folder of a checkpoint."""
    remedy = f"name another checkpoint in {folder.parent / 'latest'}"
    value = files.read_json(folder / FILE, remedy)
    try:
        records = tuple(EpochRecord(**record) for record in value["epochs"])
        return History(records, value["loss_sum"], value["num_rows"])
    except (KeyError, TypeError):
        raise UserError(f"{folder / FILE}: damaged; {remedy}") from None


class EpochOrder:
    """Rows of the steps of a run; lengths of sequences are multiples of `multiple`."""

    def __init__(
        self, rows: LabeledRows, train: TrainSettings, *, seed: int, mesh: Mesh, multiple: int
    ) -> None:
        self._rows, self._train, self._seed, self._mesh = rows, train, seed, mesh
        self._multiple = multiple
        self._steps = -(-len(rows) // train.global_batch_size)
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def step(self, step: int) -> StepBatch:
        """Rows of a step, from 0. Ranks with fewer rows fill up their micro batches."""
        epoch, place = divmod(step, self._steps)
        if epoch != self._epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._epoch, self._order = epoch, generator.permutation(len(self._rows))
        size, axis = self._train.micro_batch_size, self._mesh.data
        batch = self._train.global_batch_size
        chosen = self._order[place * batch : (place + 1) * batch]
        block = size * axis.size
        starts = range(axis.rank * size, -(-len(chosen) // block) * block, block)
        of_rank = [chosen[start : start + size] for start in starts]
        micro_batches = [
            self._rows.micro_batch(numbers, size, num_labels=len(chosen), multiple=self._multiple)
            for numbers in of_rank
        ]
        numbers = np.stack([self._sample_numbers(numbers, epoch) for numbers in of_rank])
        before = epoch * len(self._rows) + place * batch
        return StepBatch(before, len(chosen), micro_batches, numbers)

    def _sample_numbers(self, numbers: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        """A number for each sequence of a micro batch, another one in each epoch."""
        options = self._rows.num_options
        filled = np.zeros(self._train.micro_batch_size, np.int64)
        filled[: len(numbers)] = numbers + epoch * len(self._rows)
        of_sequences: npt.NDArray[np.int64] = filled[:, None] * options + np.arange(options)
        return of_sequences.reshape(-1)
