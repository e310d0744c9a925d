"""Samples and batches as NumPy arrays from memory-mapped files.

`index` writes the index folder, and datasets lie under the data root. The trainer takes batches.
Their order depends only on the number of consumed samples, so any run can resume.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokamake.config.batching import BatchSizes
from tokamake.config.objective import DEFAULT, objective_data, sentence_objectives
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.manifest import find_manifest
from tokamake.data.samples.index_folder import (
    REMEDY,
    ArrayFile,
    damaged_file,
    identity,
    matches,
    open_array,
    read_index,
)
from tokamake.data.samples.sample_index import DatasetIndex
from tokamake.data.samples.sentence_masking import KEY
from tokamake.errors import UserError

PAD = -1
"""Padding of samples with too few tokens: not a token, and without loss."""


class DocumentSpan(NamedTuple):
    """Part of a sample that comes from one sequence."""

    prefix: str
    """Dataset, relative to the data root."""
    sequence: int
    start: int
    """First token of the sequence that is in the sample."""
    stop: int
    """Token after the last one."""


class Rows(Protocol):
    """Samples in training order, each (sequence_length + 1,) tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int, /) -> npt.NDArray[np.int64]: ...


class SplitSamples(ABC):
    """Samples of one split (train, valid or another validation split) in training order.

    `digest` is the hash of everything that determines the samples and their order. `verify` checks
    that the datasets are the indexed ones; one rank of a run is enough.
    """

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        description = read_index(folder)
        if split not in description["splits"]:
            raise UserError(f"{folder}: no {split} split; run `tokamake index` with samples for it")
        self.sequence_length: int = description["sequence_length"]
        self.digest: str = description["digest"]
        self._description, self._folder = description, folder / split
        self._descriptions = description["splits"][split]["files"]
        if damaged := damaged_file(folder, description):
            reason = "damaged: has another size" if damaged.is_file() else "no such file"
            raise UserError(f"{damaged}: {reason}; {REMEDY}")
        for prefix in (dataset["prefix"] for dataset in self._descriptions if verify):
            if not matches(description["pairs"][prefix], identity(data_root, prefix)):
                raise UserError(f"{data_root / prefix}: changed since it was indexed; {REMEDY}")
        self.prefixes = [data_root / dataset["prefix"] for dataset in self._descriptions]
        names = [dataset["corpus"] for dataset in self._descriptions]
        self.corpora: tuple[str, ...] = (*dict.fromkeys(names),)
        self._corpus_numbers = np.array([self.corpora.index(name) for name in names])
        # Thousands of ranks open thousands of datasets: open each at its first sample.
        self._datasets: dict[int, IndexedDataset] = {}
        self._dataset_index = open_array(folder / split / "dataset_index.npy")
        self._dataset_sample_index = open_array(folder / split / "dataset_sample_index.npy")
        for order in (self._dataset_index, self._dataset_sample_index):
            if order.shape != (description["splits"][split]["samples"],):
                raise UserError(f"{folder / split}: damaged: {order.shape} samples; {REMEDY}")

    def __len__(self) -> int:
        return len(self._dataset_index)

    @abstractmethod
    def __getitem__(self, sample: int) -> npt.NDArray[Any]: ...

    @abstractmethod
    def spans(self, sample: int) -> list[DocumentSpan]:
        """Spans of sequences that the sample has, in order."""

    def corpus_of(self, sample: int) -> str:
        return self._descriptions[self._dataset_number(sample)]["corpus"]

    def corpus_numbers(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Index in `corpora` of the corpus of each sample, in the shape of `samples`."""
        numbers: npt.NDArray[np.int64] = self._corpus_numbers[self._dataset_index[samples]]
        return numbers

    def samples_of(self, prefix: str, sequence: int) -> npt.NDArray[np.int64]:
        """Samples, ascending, that hold at least one token of a sequence of a dataset."""
        samples = [np.zeros(0, np.int64)]
        for number, dataset in enumerate(self._descriptions):
            if dataset["prefix"] == prefix:
                of_dataset = np.flatnonzero(self._dataset_index == number)
                numbers = self._numbers_with(number, sequence)
                drawn = np.isin(self._dataset_sample_index[of_dataset], numbers, kind="sort")
                samples.append(of_dataset[drawn])
        return np.concatenate(samples)

    @abstractmethod
    def _numbers_with(self, number: int, sequence: int) -> npt.NDArray[np.int64]:
        """Numbers in a dataset, in drawing order, of the samples with a token of a sequence."""

    def _dataset(self, number: int) -> IndexedDataset:
        if number not in self._datasets:
            self._datasets[number] = IndexedDataset(self.prefixes[number])
        return self._datasets[number]

    def _dataset_number(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        number, place = int(self._dataset_index[sample]), int(self._dataset_sample_index[sample])
        # Negative numbers would count from the end.
        if not 0 <= number < len(self.prefixes) or place < 0:
            raise self._damaged(sample, f"number {place} of dataset {number}")
        return number

    def _damaged(self, sample: int, reason: object) -> UserError:
        return UserError(f"{self._folder}: damaged at sample {sample} ({reason}); {REMEDY}")


class Samples(SplitSamples):
    """Samples of documents, concatenated and cut; see `SplitSamples`."""

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        super().__init__(folder, split=split, data_root=data_root, verify=verify)
        name = self._description.get(KEY, {}).get("name", DEFAULT)
        if objective_data(name).has_sentences:
            raise UserError(
                f"{folder}: samples of objective {name}, not {DEFAULT}; set train.objective to it, "
                "or run `tokamake index` again"
            )
        for prefix in self.prefixes if verify else []:
            check_sentences(prefix, objective=name)
        self._padded = not self._description["drop_last_partial_sequence"] and split != "train"
        arrays = ArrayFile(folder / split)
        self._indexes = [
            arrays.index(dataset["arrays"], DatasetIndex) for dataset in self._descriptions
        ]

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Tokens of a sample, (sequence_length + 1,), assembled across documents.

        If the index keeps the last partial sample of a split, `PAD` fills it.
        """
        number = self._dataset_number(sample)
        dataset, index = self._dataset(number), self._indexes[number]
        try:
            (first, offset), (last, end) = self._bounds(index, sample)
            parts = [dataset[document] for document in index.document[first : last + 1]]
            # Cut the end first: if both bounds lie in one document, `end` counts from its start.
            parts[-1] = parts[-1][: end + 1]
            parts[0] = parts[0][offset:]
        except (IndexError, ValueError) as error:
            raise self._damaged(sample, error) from None
        missing = self.sequence_length + 1 - sum(map(len, parts))
        if missing < 0 or (missing and not self._padded):
            raise UserError(
                f"{self.prefixes[number]}: sample {sample} has "
                f"{self.sequence_length + 1 - missing} tokens, not {self.sequence_length + 1}: the "
                f"dataset does not match its index; {REMEDY}"
            )
        return np.concatenate([*parts, np.full(missing, PAD)], dtype=np.int64)

    def _bounds(self, index: DatasetIndex, sample: int) -> list[list[int]]:
        """First and last token of a sample: position in `document` and offset in the document."""
        row = int(index.shuffle[self._dataset_sample_index[sample]])
        bounds: list[list[int]] = index.sample[row : row + 2].tolist()
        return bounds

    def spans(self, sample: int) -> list[DocumentSpan]:
        """Spans whose concatenated tokens are the sample."""
        number = self._dataset_number(sample)
        index = self._indexes[number]
        (first, offset), (last, end) = self._bounds(index, sample)
        spans = []
        for position in range(first, last + 1):
            sequence = int(index.document[position])
            stop = end + 1 if position == last else int(self._dataset(number).lengths[sequence])
            start = offset if position == first else 0
            if start < stop:  # the order includes empty sequences
                spans.append(
                    DocumentSpan(self._descriptions[number]["prefix"], sequence, start, stop)
                )
        return spans

    def _numbers_with(self, number: int, sequence: int) -> npt.NDArray[np.int64]:
        index = self._indexes[number]
        rows: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
        firsts = index.sample[:, 0]
        for position in np.flatnonzero(index.document == sequence):
            # From the last sample that begins before the sequence to the last that begins in it.
            first = max(int(np.searchsorted(firsts, position, side="left")) - 1, 0)
            last = int(np.searchsorted(firsts, position, side="right"))
            rows.append(np.arange(first, min(last, len(firsts) - 1)))
        return np.flatnonzero(np.isin(index.shuffle, np.concatenate(rows)))


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
        num_micro_batches = size // (micro_batch_size * data_parallel_size)
        numbers = sample_numbers(
            consumed_samples,
            (num_micro_batches, micro_batch_size),
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        rows = list(islice(of_rank, num_micro_batches))
        yield StepBatch(consumed_samples, size, rows, numbers)
        consumed_samples += size


def open_samples(folder: Path, *, split: str, data_root: Path, verify: bool = True) -> SplitSamples:
    """Open the samples of a split, of any objective; for the arguments see `SplitSamples`."""
    name = read_index(folder).get(KEY, {}).get("name", DEFAULT)
    samples: SplitSamples = objective_data(name).open_samples(
        folder, split=split, data_root=data_root, verify=verify
    )
    return samples


def check_sentences(prefix: Path, *, objective: str) -> None:
    """Check a dataset whose manifest states whether its sequences are sentences."""
    manifest = find_manifest(prefix)
    if manifest is None or "split_sentences" not in manifest:
        return
    has_sentences = objective_data(objective).has_sentences
    if manifest["split_sentences"] and not has_sentences:
        raise UserError(
            f"{prefix}: its sequences are sentences (tokenize.split_sentences: true), which "
            f"objective {objective} would shuffle; set train.objective to "
            f"{sentence_objectives()}, or tokenize the corpus with split_sentences: false"
        )
    if has_sentences and not manifest["split_sentences"]:
        raise UserError(
            f"{prefix}: its sequences are documents, objective {objective} needs sentences; "
            "tokenize the corpus with tokenize.split_sentences: true, or set train.objective to "
            f"{DEFAULT}"
        )
