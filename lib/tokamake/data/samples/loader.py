"""Samples and batches as NumPy arrays, straight from memory-mapped files.

The index folder comes from `index`, the tokens from the pairs under the data root; batches go to
the trainer. The order depends on the number of consumed samples alone, so any run can resume.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import files
from tokamake.data.pairs.indexed import IndexedDataset
from tokamake.data.samples.batching import BatchSizes
from tokamake.data.samples.file_index import FileIndex
from tokamake.data.samples.index import VERSION, array_path, identity
from tokamake.errors import UserError

_REMEDY = "run `tokamake index` again"


def read_index(folder: Path) -> dict[str, Any]:
    """Read an index folder's index.json, as `index` describes it.

    Raises:
        UserError: it is missing, of another version or was changed since.
    """
    path = folder / "index.json"
    described = files.read_json(path, _REMEDY)
    if not isinstance(described, dict) or described.get("version") != VERSION:
        raise UserError(f"{path}: not an index of version {VERSION}; {_REMEDY}")
    rest = {key: value for key, value in described.items() if key != "digest"}
    if files.digest(rest) != described.get("digest"):
        raise UserError(f"{path}: does not match its own digest; {_REMEDY}")
    return described


class Piece(NamedTuple):
    """A part of a sample that comes from one sequence."""

    prefix: str
    """Pair, relative to the data root."""
    sequence: int
    """Number of the sequence in it."""
    start: int
    """First token of the sequence that is in the sample."""
    stop: int
    """Token behind the last one."""


class Samples:
    """All samples of one split, in training order.

    Attributes:
        sequence_length: tokens that the model sees per sample.
        digest: hash over all that determines the samples and their order.

    Args:
        folder: index folder.
        split: train or valid.
        data_root: folder that the prefixes are relative to.

    Raises:
        UserError: the index or a pair is missing or damaged, or the pair is not the indexed one.
    """

    def __init__(self, folder: Path, *, split: str, data_root: Path) -> None:
        described = read_index(folder)
        if split not in described["splits"]:
            raise UserError(f"{folder}: no {split} split; run `tokamake index` with samples for it")
        self.sequence_length: int = described["sequence_length"]
        self.digest: str = described["digest"]
        self._files = described["splits"][split]["files"]
        for prefix in (file["prefix"] for file in self._files):
            if identity(data_root, prefix) != described["pairs"][prefix]:
                raise UserError(f"{data_root / prefix}: changed since it was indexed; {_REMEDY}")
        self._datasets = [IndexedDataset(data_root / file["prefix"]) for file in self._files]
        self._indexes = [_file_index(folder / split, n) for n in range(len(self._files))]
        self._dataset_index = _open(folder / split / "dataset_index.npy")
        self._dataset_sample_index = _open(folder / split / "dataset_sample_index.npy")

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Tokens of one sample, (sequence_length + 1,), assembled across documents."""
        number = self._file(sample)
        dataset, index = self._datasets[number], self._indexes[number]
        (first, offset), (last, end) = self._bounds(index, sample)
        parts = [dataset[document] for document in index.document[first : last + 1]]
        # The end comes first: where both lie in one document, its offset counts from the start.
        parts[-1] = parts[-1][: end + 1]
        parts[0] = parts[0][offset:]
        tokens = np.concatenate(parts, dtype=np.int64)
        assert len(tokens) == self.sequence_length + 1
        return tokens

    def _bounds(self, index: FileIndex, sample: int) -> list[list[int]]:
        """First and last token of a sample: position in its file's `document`, and offset."""
        row = int(index.shuffle[self._dataset_sample_index[sample]])
        bounds: list[list[int]] = index.sample[row : row + 2].tolist()
        return bounds

    def source(self, sample: int) -> str:
        """Name of the corpus that a sample comes from."""
        return self._files[self._file(sample)]["corpus"]

    def pieces(self, sample: int) -> list[Piece]:
        """What a sample is made of, in order; the tokens of all pieces are those of the sample."""
        number = self._file(sample)
        index = self._indexes[number]
        (first, offset), (last, end) = self._bounds(index, sample)
        found = []
        for position in range(first, last + 1):
            sequence = int(index.document[position])
            stop = end + 1 if position == last else int(self._datasets[number].lengths[sequence])
            start = offset if position == first else 0
            if start < stop:  # sequences without tokens are in the order, too
                found.append(Piece(self._files[number]["prefix"], sequence, start, stop))
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

    def _file(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        return int(self._dataset_index[sample])


def batches(
    samples: Samples,
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


def _samples_with(index: FileIndex, sequence: int) -> npt.NDArray[np.int64]:
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
    samples: Samples,
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


def _file_index(folder: Path, number: int) -> FileIndex:
    return FileIndex(*(_open(array_path(folder, number, name)) for name in FileIndex._fields))


def _open(path: Path) -> npt.NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {_REMEDY}") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: damaged ({error}); {_REMEDY}") from None
