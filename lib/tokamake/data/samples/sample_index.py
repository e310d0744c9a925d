"""Sample index of one dataset: shuffled documents, concatenated and cut into samples.

The input is the sequence lengths of an indexed dataset. `blend_index` stores the three arrays.
Names and bytes are the same as in megatron-core's GPTDataset.
"""

from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc

_MAX_VALUES = 1 << 32
"""Above this size NumPy draws 64-bit numbers. `_csrc.shuffle` only implements the 32-bit draw."""
_SEPARATE_BELOW = 0.80
"""Megatron's threshold: if a smaller share of the last epoch is used, it is shuffled separately.
Then every document is seen in all earlier epochs before some are seen again."""


class DatasetIndex(NamedTuple):
    """Order of the samples of a dataset: `shuffle` picks a row of `sample`, which points into
    `document`."""

    document: npt.NDArray[np.int32]
    """(epochs x documents,) sequence numbers in reading order."""
    sample: npt.NDArray[np.int32] | npt.NDArray[np.int64]
    """(samples + 1, 2) position in `document` and token offset of the start of each sample."""
    shuffle: npt.NDArray[np.uint32] | npt.NDArray[np.int64]
    """(samples,) order in which samples are drawn."""

    @property
    def num_samples(self) -> int:
        return len(self.shuffle)


def count_samples(epochs: int | Fraction, *, sequence_length: int, tokens_per_epoch: int) -> int:
    """Number of whole samples in some epochs of a dataset.

    Neighboring samples share a token: the last label of one is the first input of the next.
    """
    return max(0, int((epochs * tokens_per_epoch - 1) // sequence_length))


def count_epochs(num_samples: int, *, sequence_length: int, tokens_per_epoch: int) -> int:
    """Smallest number of epochs, at least 1, that hold `num_samples` samples."""
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
    """Build the index of at least `num_samples` samples: all samples of the epochs that they need.

    Args:
        lengths: (sequences,) tokens of each sequence of the dataset.
        documents: sequences to use; they hold at least one token.
        sequence_length: tokens per sample, without the last label.
        seed: seed of numpy's RandomState, 0 to 2**32 - 1.
        separate_last_epoch: shuffle the last of several epochs separately; None: if less than 80 %
            of it is used.
        drop_last_partial_sequence: drop the last tokens that do not fill a sample; otherwise add a
            row for a shorter sample that ends with the last token.
    """
    sizes = {
        "sequence_length": sequence_length,
        "tokens_per_epoch": int(lengths[documents.start : documents.stop].sum(dtype=np.int64)),
    }
    epochs = count_epochs(num_samples, **sizes)
    total = count_samples(epochs, **sizes)
    early = _samples_before_separate_epoch(
        num_samples, epochs, sizes=sizes, separate=separate_last_epoch
    )
    # The bytes equal Megatron's only with one generator and these calls in this order.
    random = np.random.RandomState(seed)
    blocks = [epochs] if early is None else [epochs - 1, 1]
    document = np.concatenate(
        [_shuffled_epochs(documents, block, random=random) for block in blocks]
    )
    sample = _csrc.build_sample_index(
        lengths, document, sequence_length, epochs, sizes["tokens_per_epoch"]
    )
    if not drop_last_partial_sequence and epochs * sizes["tokens_per_epoch"] - 1 > (
        total * sequence_length
    ):
        end = [len(document) - 1, lengths[document[-1]] - 1]
        sample = np.concatenate([sample, np.array([end], sample.dtype)])
        total += 1
    order = _shuffled_samples(total if early is None else early, total, random=random)
    return DatasetIndex(document, sample, order)


def _samples_before_separate_epoch(
    num_samples: int, epochs: int, *, sizes: dict[str, int], separate: bool | None
) -> int | None:
    """Samples before a separate last epoch; None if all epochs are shuffled together."""
    if epochs == 1 or separate is False:
        return None
    early = count_samples(epochs - 1, **sizes)
    little_used = num_samples - early < int(_SEPARATE_BELOW * count_samples(1, **sizes))
    return early if separate or little_used else None


def _shuffled_epochs(
    documents: range, epochs: int, *, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
    order = np.tile(np.arange(documents.start, documents.stop, dtype=np.int32), epochs)
    shuffle(order, random)
    return order


def _shuffled_samples(
    early: int, total: int, *, random: np.random.RandomState
) -> npt.NDArray[np.uint32] | npt.NDArray[np.int64]:
    # Megatron's bound: one less than uint32 allows.
    small = total < np.iinfo(np.uint32).max - 1
    order = np.arange(total, dtype=np.uint32) if small else np.arange(total, dtype=np.int64)
    shuffle(order[:early], random)
    if early < total:
        shuffle(order[early:], random)
    return order


def shuffle(
    values: npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64],
    random: np.random.RandomState,
) -> None:
    """Do `random.shuffle(values)` several times faster: same order, same state of `random`."""
    if len(values) > _MAX_VALUES:
        random.shuffle(values)
        return
    state: dict[str, Any] = random.get_state(legacy=False)
    twister = state["state"]
    twister["pos"] = _csrc.shuffle(values, twister["key"], twister["pos"])
    random.set_state(state)
