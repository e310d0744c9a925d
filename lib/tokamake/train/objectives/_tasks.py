"""Objectives of tasks: rows of files, what a model makes of them, and their scores.

Shape suffixes: B rows of a micro batch, N rows of all files.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from tokamake import plugins
from tokamake.config.finetune import FinetuneTask
from tokamake.models.common.language_model import Predictions
from tokamake.parallel.axis import SINGLE_RANK_AXIS, Axis
from tokamake.train.objectives._base import KIND, ObjectiveBase

MULTIPLE = 8
"""Lengths of micro batches are multiples of this, so kernels see few different shapes."""


class TaskBatch(Protocol):
    """A micro batch of rows."""

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """(B, L) tokens: the first input of the model."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Keyword arguments of `Model.forward`."""


class RowsOfFiles(Protocol):
    """All rows of some files, in the order of the files; tokenized."""

    num_options: int
    """Sequences of a row that dropout numbers apart."""
    num_cut: int
    """Sequences whose end was cut."""
    first_unlabeled: str | None
    """File and line of the first row without a label; None: all have one."""

    def __len__(self) -> int: ...

    @property
    def num_labeled(self) -> int:
        """Number of rows that have a label."""

    @property
    def digest(self) -> str:
        """sha256 of all that the rows contain."""

    @property
    def by_length(self) -> npt.NDArray[np.int64]:
        """(N,) numbers of the rows, longest sequences first."""

    def micro_batch(
        self,
        numbers: npt.NDArray[np.int64],
        size: int,
        *,
        num_labels: int,
        multiple: int = MULTIPLE,
        epoch: tuple[int, int] | None = None,
    ) -> Any:
        """Make a `TaskBatch`, padded to its longest sequence.

        Args:
            size: rows of the batch; it is filled up with rows that have no label.
            num_labels: rows with a label in the whole step, on all ranks.
            epoch: seed of the run and number of the epoch, from which draws follow; None: a
                validation, which draws nothing.
        """


class TaskObjective(ObjectiveBase):
    """Objective of a task of `finetune`. Its samples are rows of files, which no index orders."""

    @classmethod
    @abstractmethod
    def read_rows(
        cls, files: Iterable[str], task: FinetuneTask, *, tokenizer: Path, sequence_length: int
    ) -> Any:
        """Read and tokenize files, folders or patterns of a task, as `RowsOfFiles`."""

    @staticmethod
    @abstractmethod
    def sample_outputs(predicted: Predictions) -> Tensor:
        """(B, ...) outputs of the model that scores need, fp32."""

    @staticmethod
    @abstractmethod
    def row_scores(
        outputs: npt.NDArray[np.float32], rows: Any, *, task: FinetuneTask
    ) -> dict[str, float]:
        """Values of the task's metrics; `outputs` (N, ...) are of all rows."""

    @staticmethod
    @abstractmethod
    def row_predictions(
        outputs: npt.NDArray[np.float32], rows: Any, *, task: FinetuneTask
    ) -> list[dict[str, Any]]:
        """(N) entries of a file of predictions."""


def task_objective(name: str) -> type[TaskObjective]:
    """Class of the objective of a task."""
    objective: type[TaskObjective] = plugins.load(KIND, name).Objective
    return objective


# ---- Outputs: ranks share the rows, and each row counts once ----

Forward = Callable[[Iterable[Any]], Iterator[Tensor]]
"""Micro batches → outputs of each. All ranks have the same number of micro batches."""


class RowBatches(NamedTuple):
    """How rows are divided into micro batches."""

    axis: Axis = SINGLE_RANK_AXIS
    """Ranks that share the rows."""
    size: int = 32
    """Rows of a micro batch."""
    multiple: int = MULTIPLE
    """Lengths of sequences are multiples of this."""


def row_outputs(
    forward: Forward, rows: RowsOfFiles, *, batches: RowBatches
) -> npt.NDArray[np.float32]:
    """Return (N, ...) fp32 outputs, such as logits, on all ranks of the process group.

    Ranks with fewer rows fill up their micro batches; the result leaves these rows out.
    """
    axis, size = batches.axis, batches.size
    order = rows.by_length
    own = order[axis.rank :: axis.size]
    # Ranks that gather weights do so together.
    num_batches = -(-len(order[:: axis.size]) // size)
    chosen = [own[n * size : (n + 1) * size] for n in range(num_batches)]
    micro_batches = (
        rows.micro_batch(numbers, size, num_labels=len(rows), multiple=batches.multiple)
        for numbers in chosen
    )
    parts = [
        outputs.reshape(size, -1)[: len(numbers)].float().cpu().numpy()
        for numbers, outputs in zip(chosen, forward(micro_batches), strict=True)
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, np.concatenate(parts)))
    width = gathered[0][1].shape[1]
    result = np.full((len(rows), width), np.nan, np.float32)
    for numbers, values in gathered:
        result[numbers] = values
    return result
