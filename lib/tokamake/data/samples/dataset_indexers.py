"""Builders of the sample index of one dataset, of documents or of sentences.

`blend_index` calls the indexer of the objective for each dataset of a split.
"""

import logging
from collections.abc import Mapping
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokamake.data.samples import sample_index
from tokamake.data.samples.array_file import Index
from tokamake.data.samples.index_settings import IndexSettings
from tokamake.data.samples.sample_index import DatasetIndex
from tokamake.data.samples.sentence_index import SentenceIndex, SentenceIndexer, count_epochs
from tokamake.data.samples.sentence_masking import SentenceMasking
from tokamake.data.samples.weighted_datasets import WeightedDataset
from tokamake.errors import UserError

_MAX_EPOCHS = 100_000
"""More is most likely a mistake in the weights, and would fill the memory."""

_log = logging.getLogger(__name__)


class DatasetIndexer(Protocol[Index]):
    """Builds the indexes of the datasets of a split."""

    def count(self, dataset: WeightedDataset, epochs: Fraction, /) -> int:
        """Samples in some epochs of a dataset; 0: it is left out, with a warning."""
        ...

    def build(self, dataset: WeightedDataset, num_samples: int, /) -> Index:
        """Index of at least `num_samples` samples, or of the epochs of its corpus."""
        ...

    def num_samples(self, index: Index, /) -> int:
        """Samples of an index."""
        ...

    def num_epochs(self, dataset: WeightedDataset, index: Index, /) -> int:
        """Epochs of an index."""
        ...

    def check(self, dataset: WeightedDataset, index: Index, *, drawn: int, split: str) -> None:
        """Check the drawn samples, and warn about documents that give none."""
        ...


class DocumentIndexer:
    """Indexes of concatenated documents."""

    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings

    def count(self, dataset: WeightedDataset, num_epochs: Fraction, /) -> int:
        """Samples in some epochs."""
        length = self._settings.sequence_length
        count = sample_index.count_samples(
            num_epochs, sequence_length=length, tokens_per_epoch=dataset.tokens
        )
        if not count:
            _log.warning(
                "%s: left out of the train split: its %d tokens do not fill a sample of %d",
                *(dataset.line.prefix, dataset.tokens, length),
            )
        return count

    def build(self, dataset: WeightedDataset, num_samples: int, /) -> DatasetIndex:
        """Index of shuffled documents."""
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

    def num_samples(self, index: DatasetIndex, /) -> int:
        return len(index.shuffle)

    def num_epochs(self, dataset: WeightedDataset, index: DatasetIndex, /) -> int:
        return len(index.document) // len(dataset.documents)

    def check(self, *_: object, **__: object) -> None:
        pass


class SentenceDatasetIndexer:
    """Indexes of sentences; without `epochs_of`, numbers of samples decide."""

    def __init__(
        self,
        settings: IndexSettings,
        *,
        epochs_of: Mapping[str, Fraction],
        pieces: npt.NDArray[np.uint8],
    ) -> None:
        assert settings.objective is not None, "it is not the default objective"
        self.masking, self.seed = SentenceMasking(**settings.objective), settings.seed
        self._indexer = SentenceIndexer(self.masking, seed=settings.seed)
        self._epochs_of, self.pieces = epochs_of, pieces

    def count(self, dataset: WeightedDataset, num_epochs: Fraction, /) -> int:
        """Samples in some epochs."""
        count = len(self._indexer.build_epochs(dataset, num_epochs).mapping)
        if not count:
            _log.warning(
                "%s: left out of the train split: %s of its epochs hold no sample",
                *(dataset.line.prefix, f"{float(num_epochs):g}"),
            )
        return count

    def build(self, dataset: WeightedDataset, num_samples: int, /) -> SentenceIndex:
        if self._epochs_of:
            return self._indexer.build_epochs(dataset, self._epochs_of[dataset.line.corpus])
        index = self._indexer.build(dataset, 1)
        _check_epochs(dataset, num_samples // len(index.mapping))
        return self._indexer.build(dataset, num_samples)

    def num_samples(self, index: SentenceIndex, /) -> int:
        return len(index.mapping)

    def num_epochs(self, dataset: WeightedDataset, index: SentenceIndex, /) -> int:  # noqa: ARG002
        return count_epochs(index)

    def check(
        self,
        dataset: WeightedDataset,
        index: SentenceIndex,  # noqa: ARG002
        *,
        drawn: int,  # noqa: ARG002
        split: str,
    ) -> None:
        """Warn about documents without a sample."""
        self._indexer.warn_of_left_out(dataset, split=split)


def _check_epochs(dataset: WeightedDataset, num_epochs: int) -> None:
    if num_epochs > _MAX_EPOCHS:
        raise UserError(
            f"{dataset.line.prefix}: its {dataset.tokens:,} tokens would be seen {num_epochs:,} "
            "times; lower its weight or draw fewer samples"
        )
