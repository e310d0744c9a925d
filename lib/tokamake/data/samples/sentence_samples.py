"""Samples of sentence data, and the sentences of objectives that mask words.

`masked` and `span_corruption` turn sentences into samples. A sample depends on the seed and its
number in its dataset alone, so any worker, rank or resumed run makes the same bytes.
"""

from abc import abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.samples.dataset_indexers import SentenceIndex
from tokamake.data.samples.index_folder import REMEDY, ArrayFile, open_array
from tokamake.data.samples.loader import DocumentSpan, SplitSamples, check_sentences
from tokamake.data.samples.sentence_masking import KEY, PIECES, SentenceMasking
from tokamake.errors import UserError

_NUM_SEEDS = 2**32


class SentenceSample(NamedTuple):
    """Sentences of a sample, before it is truncated and masked."""

    tokens: npt.NDArray[np.int32]
    """(tokens,) concatenated sentences."""
    lengths: npt.NDArray[np.int32]
    """(sentences,) tokens of each."""
    target: int
    """Most tokens to use."""
    seed: int
    """Seed of its random numbers, as in megatron-core: the run's seed plus the sample's number."""


class IndexedSentences(SplitSamples):
    """Samples of one split that are rows of a `SentenceIndex`; see `SplitSamples`."""

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        super().__init__(folder, split=split, data_root=data_root, verify=verify)
        self._stated: dict[str, Any] = self._description.get(KEY, {})
        if not self._stated:
            raise UserError(
                f"{folder}: its samples are documents, not sentences; run `tokamake index` again"
            )
        for prefix in self.prefixes if verify else []:
            check_sentences(prefix, objective=self._stated["name"])
        self._seed: int = self._description["seed"]
        arrays = ArrayFile(folder / split)
        self._indexes = [
            arrays.index(dataset["arrays"], SentenceIndex) for dataset in self._descriptions
        ]

    def spans(self, sample: int) -> list[DocumentSpan]:
        """Sentences of a sample, whole, in their order in the document."""
        number = self._dataset_number(sample)
        first, end, *_ = self._row(sample)
        lengths = self._dataset(number).lengths[first:end].tolist()
        prefix = self._descriptions[number]["prefix"]
        return [
            DocumentSpan(prefix, sentence, 0, length)
            for sentence, length in zip(range(first, end), lengths, strict=True)
        ]

    def _numbers_with(self, number: int, sequence: int) -> npt.NDArray[np.int64]:
        rows = self._indexes[number].mapping
        return np.flatnonzero((rows[:, 0] <= sequence) & (sequence < rows[:, 1]))

    def _row(self, sample: int) -> list[int]:
        """First sentence, end of sentences, and further columns of the index."""
        rows = self._indexes[self._dataset_number(sample)].mapping
        row: list[int] = rows[self._dataset_sample_index[sample]].tolist()
        return row


class SentenceSamples(IndexedSentences):
    """Samples of sentence data of one split, as records of int64 fields; see `SplitSamples`.

    `samples[i]` is an array without dimensions, with the fields of `record`; `steps.batches`
    stacks B of them to an array (B,), whose fields are arrays (B, ...).
    """

    record: np.dtype[np.void]

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        super().__init__(folder, split=split, data_root=data_root, verify=verify)
        self.objective = SentenceMasking(**self._stated)
        self._pieces: npt.NDArray[np.uint8] = open_array(folder / PIECES)

    def __getitem__(self, sample: int) -> npt.NDArray[Any]:
        row = np.empty(self.record.itemsize // 8, np.int64)
        try:
            self._write(self.sentences(sample), row)
        except (ValueError, IndexError) as error:
            prefix = self.prefixes[self._dataset_number(sample)]
            raise UserError(
                f"{prefix}: sample {sample}: {error}: the dataset does not match its index; "
                f"{REMEDY}"
            ) from error
        return row.view(self.record).reshape(())

    @abstractmethod
    def _write(self, sentences: SentenceSample, row: npt.NDArray[np.int64]) -> None:
        """Write the record of a sample as int64 numbers."""

    def sentences(self, sample: int) -> SentenceSample:
        """Sentences of a sample."""
        first, end, target = self._row(sample)
        dataset = self._dataset(self._dataset_number(sample))
        parts = [dataset[sentence] for sentence in range(first, end)]
        number = int(self._dataset_sample_index[sample])
        return SentenceSample(
            np.concatenate(parts, dtype=np.int32, casting="unsafe"),
            np.array([len(part) for part in parts], np.int32),
            target,
            (self._seed + number) % _NUM_SEEDS,
        )
