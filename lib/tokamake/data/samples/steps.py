"""Training steps: the micro batches of a rank, in an order that no number of ranks changes.

The order depends only on the number of consumed samples, so any run can resume.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokamake.config.batching import BatchSizes


class Rows(Protocol):
    """Samples in training order, each (sequence_length + 1,) tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int, /) -> npt.NDArray[np.int64]: ...


class StepBatch(NamedTuple):
    """Data of a rank for one training step."""

    consumed_samples: int
    """Samples that all ranks consumed before."""
    global_batch_size: int
    """Samples of all ranks in this step."""
    micro_batches: list[Any]
    """Micro batches of this rank, (micro_batch_size, sequence_length + 1) int64 each, or rows of a
    task; none if the data of the step are left out."""
    sample_numbers: npt.NDArray[np.int64]
    """(micro batches, micro_batch_size) number of each sample of this rank."""


def steps(
    samples: Rows,
    sizes: BatchSizes,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    left_out: Sequence[tuple[int, int]] = (),
) -> Iterator[StepBatch]:
    """Yield steps until the samples do not fill another one; `sizes` has the size of each step.

    The samples of a step depend only on `consumed_samples`. Micro batches and ranks only divide
    them. `left_out` has the first and last number, from 1, of steps whose samples are not read.
    """
    sizes.check_micro_batches(micro_batch_size, data_parallel_size)
    while consumed_samples + (size := sizes.at(consumed_samples)) <= len(samples):
        step = sizes.whole_steps(consumed_samples) + 1
        if any(first <= step <= last for first, last in left_out):
            none = np.zeros((0, micro_batch_size), np.int64)
            yield StepBatch(consumed_samples, size, [], none)
            consumed_samples += size
            continue
        of_rank = batches(
            samples,
            consumed_samples=consumed_samples,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        num_micro_batches = sizes.num_micro_batches(micro_batch_size, data_parallel_size, size=size)
        numbers = sample_numbers(
            consumed_samples,
            (num_micro_batches, micro_batch_size),
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        rows = list(islice(of_rank, num_micro_batches))
        yield StepBatch(consumed_samples, size, rows, numbers)
        consumed_samples += size


def batches(
    samples: Rows,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield a rank's micro batches, (micro_batch_size, sequence_length + 1), until samples run out.

    All ranks together take contiguous blocks, as Megatron's sequential sampler does. A global batch
    therefore holds the same samples for any number of ranks. Samples that do not fill a last block
    are left out.
    """
    assert 0 <= data_parallel_rank < data_parallel_size
    block = micro_batch_size * data_parallel_size
    for start in range(consumed_samples, len(samples) - block + 1, block):
        first = start + data_parallel_rank * micro_batch_size
        yield np.stack([samples[first + row] for row in range(micro_batch_size)])


def sample_numbers(
    consumed_samples: int,
    shape: tuple[int, int],
    *,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> npt.NDArray[np.int64]:
    """Numbers of the samples that `batches` yields to a rank, in the shape (micro batches, B)."""
    num_batches, micro_batch_size = shape
    block = micro_batch_size * data_parallel_size
    first = consumed_samples + data_parallel_rank * micro_batch_size
    return first + np.arange(num_batches)[:, None] * block + np.arange(micro_batch_size)
