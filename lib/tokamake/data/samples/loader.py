"""Samples as NumPy arrays from memory-mapped files.

`index` writes the index folder, and datasets lie under the data root. Each kind of samples derives
from `SplitSamples`; `steps.py` divides them into training steps.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.config.objective import DEFAULT, objective_data, sentence_objectives
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.manifest import find_manifest
from tokamake.data.samples.index_folder import (
    REMEDY,
    damaged_file,
    identity,
    matches,
    open_array,
    read_index,
)
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
