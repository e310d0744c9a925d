"""Samples of one token file: documents are shuffled, laid end to end, and cut at equal lengths.

Sequence lengths come from `indexed`; the three arrays go to `index`, which stores them. They equal
those of megatron-core's GPTDataset, whose terms they keep.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.samples.shuffle import shuffle

Integers = npt.NDArray[np.integer]

_SEPARATE_BELOW = 0.80
"""A last epoch used less than this is shuffled by itself, lest its documents be seen more often."""


class DatasetIndex(NamedTuple):
    """Order of one file's samples: `shuffle` picks a sample, `sample` and `document` its tokens."""

    document: npt.NDArray[np.int32]
    """(epochs x documents,) sequence numbers in the order they are read."""
    sample: npt.NDArray[np.int32] | npt.NDArray[np.int64]
    """(samples + 1, 2) position in `document` and token offset where each sample begins."""
    shuffle: npt.NDArray[np.uint32] | npt.NDArray[np.int64]
    """(samples,) order in which samples are drawn."""


def count_samples(num_epochs: int, *, sequence_length: int, tokens_per_epoch: int) -> int:
    """Whole samples in some epochs; the last label of one is the first token of the next."""
    return (num_epochs * tokens_per_epoch - 1) // sequence_length


def count_epochs(num_samples: int, *, sequence_length: int, tokens_per_epoch: int) -> int:
    """Fewest epochs, at least one, that hold `num_samples` samples."""
    return max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))


def build(
    lengths: npt.NDArray[np.int32],
    documents: range,
    *,
    num_samples: int,
    sequence_length: int,
    seed: int,
    separate_last_epoch: bool | None = None,
    drop_last_partial_sequence: bool = True,
) -> DatasetIndex:
    """Build the index of at least `num_samples` samples from a file's `documents`.

    Args:
        lengths: (sequences,) tokens of each sequence of the file.
        documents: sequences to draw from; they hold one token or more.
        num_samples: samples wanted; all samples of the epochs that this takes are indexed.
        sequence_length: tokens per sample, the last label not counted.
        seed: of numpy's RandomState, 0 to 2**32 - 1.
        separate_last_epoch: shuffle the last of several epochs by itself; None: if less than 80 %
            of it is used.
        drop_last_partial_sequence: leave out what does not fill a last sample; else it is a row
            that ends with the last token.
    """
    sizes = {
        "sequence_length": sequence_length,
        "tokens_per_epoch": int(lengths[documents.start : documents.stop].sum(dtype=np.int64)),
    }
    epochs = count_epochs(num_samples, **sizes)
    total = count_samples(epochs, **sizes)
    early = _samples_before_separate_epoch(num_samples, epochs, sizes, separate_last_epoch)
    # Byte for byte means: one generator, and these calls in this order.
    random = np.random.RandomState(seed)
    blocks = [epochs] if early is None else [epochs - 1, 1]
    document = np.concatenate([_shuffled_epochs(documents, block, random) for block in blocks])
    sample = _csrc.build_sample_index(
        lengths, document, sequence_length, epochs, sizes["tokens_per_epoch"]
    )
    if not drop_last_partial_sequence and epochs * sizes["tokens_per_epoch"] - 1 > (
        total * sequence_length
    ):
        end = [len(document) - 1, lengths[document[-1]] - 1]
        sample = np.concatenate([sample, np.array([end], sample.dtype)])
        total += 1
    drawn = _shuffled_samples(total if early is None else early, total, random)
    return DatasetIndex(document, sample, drawn)


def _samples_before_separate_epoch(
    num_samples: int, epochs: int, sizes: dict[str, int], separate: bool | None
) -> int | None:
    """Samples before the last epoch; None: it is shuffled with the others."""
    if epochs == 1 or separate is False:
        return None
    early = count_samples(epochs - 1, **sizes)
    little = num_samples - early < int(_SEPARATE_BELOW * count_samples(1, **sizes))
    return early if separate or little else None


def _shuffled_epochs(
    documents: range, epochs: int, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
    order = np.tile(np.arange(documents.start, documents.stop, dtype=np.int32), epochs)
    shuffle(order, random)
    return order


def _shuffled_samples(
    early: int, total: int, random: np.random.RandomState
) -> npt.NDArray[np.uint32] | npt.NDArray[np.int64]:
    # The bound is Megatron's: one below the last that would fit.
    small = total < np.iinfo(np.uint32).max - 1
    order = np.arange(total, dtype=np.uint32) if small else np.arange(total, dtype=np.int64)
    shuffle(order[:early], random)
    if early < total:
        shuffle(order[early:], random)
    return order
