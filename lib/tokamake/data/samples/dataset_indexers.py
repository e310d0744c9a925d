"""Datasets of a split, and builders of the sample index of each: of documents or of sentences.

`blend_index` calls the indexer of the objective for each dataset.
"""

import logging
from abc import abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.mixture.weighting_file import WeightedPrefix
from tokamake.data.samples import sample_index
from tokamake.data.samples.index_options import IndexSettings
from tokamake.data.samples.sample_index import DatasetIndex
from tokamake.data.samples.sentence_masking import SentenceMasking
from tokamake.errors import UserError

SampleMapping = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
Index = TypeVar("Index", DatasetIndex, "SentenceIndex")

_MAX_EPOCHS = 100_000
"""More is most likely a mistake in the weights, and would fill the memory."""
_MAX_SEED = 2**31 - 2
_UNLIMITED = 2**63 - 1
_LONGEST_SENTENCE = 512
"""Megatron leaves out documents with a longer sentence."""

_log = logging.getLogger(__name__)


class WeightedDataset(NamedTuple):
    """A dataset of a split."""

    line: WeightedPrefix
    dataset: IndexedDataset
    documents: range
    """Documents that belong to the split; they hold at least one token. For the objective causal,
    each sequence counts as a document."""
    has_sentences: bool = False
    """Whether a document has several sequences: its sentences."""
    companion: IndexedDataset | None = None
    """Dataset that is read along with it, such as titles; see `ObjectiveData.companions`."""
    companion_prefix: str = ""

    @property
    def sequences(self) -> range:
        if not self.has_sentences:
            return self.documents
        bounds = self.dataset.document_bounds
        return range(int(bounds[self.documents.start]), int(bounds[self.documents.stop]))

    @property
    def tokens(self) -> int:
        first, stop = self.sequences.start, self.sequences.stop
        return int(self.dataset.lengths[first:stop].sum(dtype="int64"))


def count_documents(dataset: IndexedDataset, *, has_sentences: bool) -> int:
    """Number of documents of a dataset; without sentences, each sequence is one."""
    return len(dataset.document_bounds) - 1 if has_sentences else len(dataset)


class SentenceIndex(NamedTuple):
    """Samples of a dataset in the order in which they are drawn."""

    mapping: SampleMapping
    """(samples, 3) first sentence, end of sentences, target tokens; or (samples, 4) for blocks:
    document and number of the block in its epoch in place of target tokens."""

    @property
    def num_samples(self) -> int:
        return len(self.mapping)


class DatasetIndexer(Protocol[Index]):
    """Builds the indexes of the datasets of a split."""

    def count(self, dataset: WeightedDataset, epochs: Fraction) -> int:
        """Samples in some epochs of a dataset; 0: it is left out, with a warning."""
        ...

    def build(self, dataset: WeightedDataset, num_samples: int) -> Index:
        """Index of at least `num_samples` samples, or of the epochs of its corpus."""
        ...

    def num_epochs(self, dataset: WeightedDataset, index: Index) -> int:
        """Epochs of an index."""
        ...

    def check(self, dataset: WeightedDataset, index: Index, *, drawn: int, split: str) -> None:
        """Check the drawn samples, and warn about documents that give none."""
        ...


class DocumentIndexer(DatasetIndexer[DatasetIndex]):
    """Indexes of concatenated, shuffled documents."""

    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings

    def count(self, dataset: WeightedDataset, epochs: Fraction) -> int:
        """Samples in some epochs; warn if there are none."""
        length = self._settings.sequence_length
        count = sample_index.count_samples(
            epochs, sequence_length=length, tokens_per_epoch=dataset.tokens
        )
        if not count:
            _log.warning(
                "%s: left out of the train split: its %d tokens do not fill a sample of %d",
                *(dataset.line.prefix, dataset.tokens, length),
            )
        return count

    def build(self, dataset: WeightedDataset, num_samples: int) -> DatasetIndex:
        """Index of at least `num_samples` samples."""
        settings = self._settings
        _check_epochs(dataset, num_samples * settings.sequence_length // dataset.tokens)
        return sample_index.build(
            dataset.dataset.lengths,
            dataset.documents,
            num_samples=num_samples,
            sequence_length=settings.sequence_length,
            seed=settings.seed,
            separate_last_epoch=settings.separate_last_epoch,
            drop_last_partial_sequence=settings.drop_last_partial_sequence,
        )

    def num_epochs(self, dataset: WeightedDataset, index: DatasetIndex) -> int:
        return len(index.document) // len(dataset.documents)

    def check(self, *_: object, **__: object) -> None:
        pass


class SentenceDatasetIndexer(DatasetIndexer[SentenceIndex]):
    """Indexes of sentences, equal to megatron-core's, which shuffle all epochs together.

    `epochs_of` has the epochs of each corpus; empty: numbers of samples decide. A sample has
    `min_sentences` sentences or more.
    """

    def __init__(
        self, settings: IndexSettings, *, epochs_of: Mapping[str, Fraction], min_sentences: int
    ) -> None:
        self.seed, self.min_sentences = settings.seed, min_sentences
        if not 1 <= self.seed <= _MAX_SEED:
            raise UserError(
                f"seed: {self.seed}: out of range; give 1 to {_MAX_SEED} for sentence data"
            )
        self._epochs_of = epochs_of

    def count(self, dataset: WeightedDataset, epochs: Fraction) -> int:
        """Samples in some epochs; warn if there are none."""
        count = len(self._epochs(dataset, epochs))
        if not count:
            _log.warning(
                "%s: left out of the train split: %s of its epochs hold no sample",
                *(dataset.line.prefix, f"{float(epochs):g}"),
            )
        return count

    def build(self, dataset: WeightedDataset, num_samples: int) -> SentenceIndex:
        """Index of at least `num_samples` samples, or of the epochs of its corpus."""
        if self._epochs_of:
            return SentenceIndex(self._epochs(dataset, self._epochs_of[dataset.line.corpus]))
        rows = self._epoch(dataset)
        _check_epochs(dataset, num_samples // len(rows))
        if len(rows) < num_samples:
            rows = self._mapping(dataset, num_epochs=_MAX_SEED, max_num_samples=num_samples)
        return SentenceIndex(rows)

    def num_epochs(self, dataset: WeightedDataset, index: SentenceIndex) -> int:  # noqa: ARG002
        """Epochs of an index: how often its first sample's document occurs."""
        first = index.mapping[:, 0]
        return int((first == first.min()).sum())

    def check(
        self,
        dataset: WeightedDataset,
        index: SentenceIndex,  # noqa: ARG002
        *,
        drawn: int,  # noqa: ARG002
        split: str,
    ) -> None:
        """Warn about documents that give no sample."""
        first, stop = dataset.documents.start, dataset.documents.stop
        bounds = np.asarray(dataset.dataset.document_bounds[first : stop + 1])
        counts = np.diff(bounds)
        too_long = dataset.dataset.lengths[bounds[0] : bounds[-1]] > _LONGEST_SENTENCE
        before = np.append(0, np.cumsum(too_long))[bounds - bounds[0]]
        has_long = (np.diff(before) > 0) & (counts > 1)
        too_few = counts < self.min_sentences
        for mask, reason in (
            (has_long & ~too_few, f"have a sentence of more than {_LONGEST_SENTENCE} tokens"),
            (too_few, f"have fewer than {self.min_sentences} sentences"),
        ):
            if num := int(mask.sum()):
                _log.warning(
                    "%s: %d of %d documents of the %s split are left out: they %s",
                    *(dataset.line.prefix, num, len(counts), split, reason),
                )

    def _epochs(self, dataset: WeightedDataset, epochs: Fraction) -> SampleMapping:
        """Return the samples of exactly some epochs.

        Samples of whole epochs are shuffled together. The rest of a last epoch, shuffled by another
        seed, comes after them, so that no document is seen more often than necessary.
        """
        whole = int(epochs)
        rows = [self._mapping(dataset, num_epochs=whole)] if whole else []
        if rest := epochs - whole:
            last = self._epoch(dataset, seed=self.seed % _MAX_SEED + 1)
            rows.append(last[: round(rest * len(last))])
        joined: Any = np.concatenate(rows)  # of one dtype
        return joined

    def _epoch(self, dataset: WeightedDataset, *, seed: int | None = None) -> SampleMapping:
        rows = self._mapping(dataset, num_epochs=1, seed=seed)
        if not len(rows):
            raise UserError(
                f"{dataset.line.prefix}: no document gives a sample: a sample has "
                f"{self.min_sentences} or more sentences of at most "
                f"{_LONGEST_SENTENCE} tokens; tokenize with split_sentences, or leave the dataset "
                "out"
            )
        return rows

    def _mapping(
        self,
        dataset: WeightedDataset,
        *,
        num_epochs: int,
        max_num_samples: int = _UNLIMITED,
        seed: int | None = None,
    ) -> SampleMapping:
        """Rows of `SentenceIndex.mapping`, shuffled; `seed`: instead of the run's."""
        documents = dataset.documents
        bounds = dataset.dataset.document_bounds[documents.start : documents.stop + 1]
        try:
            return self._map(
                dataset,
                np.ascontiguousarray(bounds, np.int64),
                num_epochs=num_epochs,
                max_num_samples=max_num_samples,
                seed=self.seed if seed is None else seed,
            )
        except (ValueError, IndexError) as error:
            raise UserError(
                f"{dataset.line.prefix}: {error}; write the dataset's .idx file again"
            ) from error

    @abstractmethod
    def _map(
        self, dataset: WeightedDataset, bounds: npt.NDArray[np.int64], **options: int
    ) -> SampleMapping:
        """Rows of documents with these bounds; `options` of the mappings of `_csrc`."""


class MaskingIndexer(SentenceDatasetIndexer):
    """Indexes of sentences whose words are masked."""

    def __init__(
        self,
        settings: IndexSettings,
        *,
        epochs_of: Mapping[str, Fraction],
        pieces: npt.NDArray[np.uint8],
    ) -> None:
        assert settings.objective is not None, "it is not the default objective"
        self.masking, self.pieces = SentenceMasking(**settings.objective), pieces
        super().__init__(settings, epochs_of=epochs_of, min_sentences=self.masking.min_sentences)

    def _map(
        self, dataset: WeightedDataset, bounds: npt.NDArray[np.int64], **options: int
    ) -> SampleMapping:
        return _csrc.build_mapping(
            bounds,
            dataset.dataset.lengths,
            max_seq_length=self.masking.target_tokens,
            short_seq_prob=self.masking.short_sequence_probability,
            min_num_sent=self.min_sentences,
            **options,
        )


def _check_epochs(dataset: WeightedDataset, num_epochs: int) -> None:
    if num_epochs > _MAX_EPOCHS:
        raise UserError(
            f"{dataset.line.prefix}: its {dataset.tokens:,} tokens would be seen {num_epochs:,} "
            "times; lower its weight or draw fewer samples"
        )
