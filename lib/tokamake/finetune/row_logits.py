"""Logits of the rows of a task: ranks share the rows, and each row counts once.

N is the number of rows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from tokamake.finetune.rows import LabeledRows
from tokamake.parallel.axis import SINGLE_RANK_AXIS, Axis
from tokamake.train.objectives.classification.rows import TaskRows

Forward = Callable[[Iterable[TaskRows]], Iterator[Tensor]]
"""From micro batches to the logits of each. All ranks have as many micro batches."""


class RowBatches(NamedTuple):
    """How rows are divided into micro batches."""

    axis: Axis = SINGLE_RANK_AXIS
    """Ranks that share the rows."""
    size: int = 32
    """Rows of a micro batch."""
    multiple: int = 8
    """Lengths of sequences are multiples of this."""


def row_logits(
    forward: Forward, rows: LabeledRows, *, batches: RowBatches
) -> npt.NDArray[np.float32]:
    """Return (N, classes or options) fp32 logits, on all ranks of the process group.

    Ranks with fewer rows than others fill up their micro batches; such rows have no part in the
    result.
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
        logits.reshape(size, -1)[: len(numbers)].float().cpu().numpy()
        for numbers, logits in zip(chosen, forward(micro_batches), strict=True)
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, np.concatenate(parts)))
    width = gathered[0][1].shape[1]
    result = np.full((len(rows), width), np.nan, np.float32)
    for numbers, values in gathered:
        result[numbers] = values
    return result
