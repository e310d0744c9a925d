"""Samples and batches as NumPy arrays, straight from memory-mapped files.

The index folder comes from `index`, the tokens from the pairs under the data root; batches go to
the trainer. The order depends on the number of consumed samples alone, so any run can resume.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokamake.config.batching import BatchSizes
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.array_file import Arrays
from tokamake.data.samples.dataset_index import DatasetIndex
from tokamake.data.samples.index_folder import REMEDY, identity, is_pair, read_index
from tokamake.errors import UserError

PAD = -1
"""In the place of tokens that a sample has too few of: no token, and no loss."""


class DocumentSpan(NamedTuple):
    """A part of a sample that comes from one sequence."""

    prefix: str
    """Pair, relative to the data root."""
    sequence: int
    """Number of the sequence in it."""
    start: int
    """First token of the sequence that is in the sample."""
    stop: int
    """Token behind the last one."""


class Rows(Protocol):
    """Samples in training order, each (sequence_length + 1,) tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int, /) -> npt.NDArray[np.int64]: ...


class Samples:
    """All samples of one split, in training order.

    Attributes:
        sequence_length: tokens that the model sees per sample.
        digest: hash over all that determines the samples and their order.
        pairs: prefixes of the pairs that they come from.

    Args:
        folder: index folder.
        split: train, valid or another validation set.
        data_root: folder that the prefixes are relative to.
        verify: see that all pairs are those that were indexed; of many ranks one is enough.

    Raises:
        UserError: the index or a pair is missing or damaged, or the pair is not the indexed one.
    """

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        described = read_index(folder)
        if split not in described["splits"]:
            raise UserError(f"{folder}: no {split} split; run `tokamake index` with samples for it")
        self.sequence_length: int = described["sequence_length"]
        self.digest: str = described["digest"]
        self._padded = not described["drop_last_partial_sequence"] and split != "train"
        self._files = described["splits"][split]["files"]
        for prefix in (file["prefix"] for file in self._files if verify):
            if not is_pair(described["pairs"][prefix], identity(data_root, prefix)):
                raise UserError(f"{data_root / prefix}: changed since it was indexed; {REMEDY}")
        self.pairs = [data_root / file["prefix"] for file in self._files]
        # Thousands of ranks open thousands of pairs: each opens one when it first draws from it.
        self._opened: dict[int, IndexedDataset] = {}
        arrays = Arrays(folder / split)
        self._indexes = [arrays.index(file["arrays"]) for file in self._files]
        self._dataset_index = _open(folder / split / "dataset_index.npy")
        self._dataset_sample_index = _open(folder / split / "dataset_sample_index.npy")

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Tokens of one sample, (sequence_length + 1,), assembled across documents.

        Where the index keeps the last tokens of a set that fill no sample, the last is filled up
        with `PAD`.
        """
        number = self._file(sample)
        dataset, index = self._dataset(number), self._indexes[number]
        (first, offset), (last, end) = self._bounds(index, sample)
        parts = [dataset[document] for document in index.document[first : last + 1]]
        # The end comes first: where both lie in one document, its offset counts from the start.
        parts[-1] = parts[-1][: end + 1]
        parts[0] = parts[0][offset:]
        missing = self.sequence_length + 1 - sum(map(len, parts))
        assert missing == 0 or (missing > 0 and self._padded)
        return np.concatenate([*parts, np.full(missing, PAD)], dtype=np.int64)

    def _bounds(self, index: DatasetIndex, sample: int) -> list[list[int]]:
        """First and last token of a sample: position in its file's `document`, and offset."""
        row = int(index.shuffle[self._dataset_sample_index[sample]])
        bounds: list[list[int]] = index.sample[row : row + 2].tolist()
        return bounds

    def source(self, sample: int) -> str:
        """Name of the corpus that a sample comes from."""
        return self._files[self._file(sample)]["corpus"]

    def pieces(self, sample: int) -> list[DocumentSpan]:
        """What a sample is made of, in order; the tokens of all pieces are those of the sample."""
        number = self._file(sample)
        index = self._indexes[number]
        (first, offset), (last, end) = self._bounds(index, sample)
        found = []
        for position in range(first, last + 1):
            sequence = int(index.document[position])
            stop = end + 1 if position == last else int(self._dataset(number).lengths[sequence])
            start = offset if position == first else 0
            if start < stop:  # sequences without tokens are in the order, too
                found.append(DocumentSpan(self._files[number]["prefix"], sequence, start, stop))
        return found

    def seen(self, prefix: str, sequence: int) -> npt.NDArray[np.int64]:
        """Samples, ascending, that hold a token of a sequence of a pair; a shared one counts."""
        found = [np.zeros(0, np.int64)]
        for number, file in enumerate(self._files):
            if file["prefix"] == prefix:
                wanted = _samples_with(self._indexes[number], sequence)
                of_file = np.flatnonzero(self._dataset_index == number)
                taken = np.isin(self._dataset_sample_index[of_file], wanted, kind="sort")
                found.append(of_file[taken])
        return np.concatenate(found)

    def _dataset(self, number: int) -> IndexedDataset:
        if number not in self._opened:
            self._opened[number] = IndexedDataset(self.pairs[number])
        return self._opened[number]

    def _file(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        return int(self._dataset_index[sample])


def batches(
    samples: Rows,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield a rank's micro batches, (micro_batch_size, sequence_length + 1), until samples run out.

    All ranks together take contiguous blocks, each rank its rows: Megatron's sequential sampler.
    So a global batch holds the same samples however many ranks share it. Samples that do not fill
    a last block are left out.
    """
    assert 0 <= data_parallel_rank < data_parallel_size
    block = micro_batch_size * data_parallel_size
    for start in range(consumed_samples, len(samples) - block + 1, block):
        first = start + data_parallel_rank * micro_batch_size
        yield np.stack([samples[first + row] for row in range(micro_batch_size)])


def _samples_with(index: DatasetIndex, sequence: int) -> npt.NDArray[np.int64]:
    """Samples of a file, by the order in which it gives them, that hold a token of a sequence."""
    rows: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    firsts = index.sample[:, 0]
    for position in np.flatnonzero(index.document == sequence):
        # From the last sample that begins before it, to the last that begins in it.
        first = max(int(np.searchsorted(firsts, position, side="left")) - 1, 0)
        last = int(np.searchsorted(firsts, position, side="right"))
        rows.append(np.arange(first, min(last, len(firsts) - 1)))
    return np.flatnonzero(np.isin(index.shuffle, np.concatenate(rows)))


class Step(NamedTuple):
    """What a rank needs for one training step."""

    consumed_samples: int
    """Samples that all ranks had consumed before."""
    global_batch_size: int
    """Samples of all ranks in this step."""
    micro_batches: list[npt.NDArray[np.int64]]
    """Of this rank, (micro_batch_size, sequence_length + 1) each."""


def steps(
    samples: Rows,
    sizes: BatchSizes,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[Step]:
    """Yield steps, each of as many samples as `sizes` says, until there are not enough.

    What a step holds depends on `consumed_samples` alone; micro batches and ranks only divide it.

    Raises:
        UserError: a batch cannot be divided into whole micro batches of all ranks.
    """
    sizes.check(micro_batch_size, data_parallel_size)
    while consumed_samples + (size := sizes.at(consumed_samples)) <= len(samples):
        of_rank = batches(
            samples,
            consumed_samples=consumed_samples,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        number = size // (micro_batch_size * data_parallel_size)
        yield Step(consumed_samples, size, list(islice(of_rank, number)))
        consumed_samples += size


def _open(path: Path) -> npt.NDArray[Any]:
    try:
        # As a plain array: each slice of np.memmap's own kind costs a microsecond more.
        return np.asarray(np.load(path, mmap_mode="r"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {REMEDY}") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: damaged ({error}); {REMEDY}") from None
