"""Sample index of one dataset of sentences: the rows of `sentence_mappings` for BERT and T5.

`blend_index` stores it. The rows equal megatron-core's masked datasets, which shuffle all
epochs together.
"""

import logging
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from tokamake.data.samples.sentence_mappings import SampleMapping, Sentences, sentence_mapping
from tokamake.data.samples.sentence_masking import SentenceMasking
from tokamake.data.samples.weighted_datasets import WeightedDataset
from tokamake.errors import UserError

_LONGEST_SENTENCE = 512
"""Megatron leaves out documents with a longer sentence."""
_MAX_SEED = 2**31 - 2

_log = logging.getLogger(__name__)


class SentenceIndex(NamedTuple):
    """Samples of a dataset in the order in which they are drawn."""

    mapping: SampleMapping
    """(samples, 3) first sentence, end of sentences, target tokens."""


class SentenceIndexer:
    """Builds the index of datasets of one split, with a `seed` of 1 to 2**31 - 2."""

    def __init__(self, objective: SentenceMasking, *, seed: int) -> None:
        if not 1 <= seed <= _MAX_SEED:
            raise UserError(f"seed: {seed}: out of range; give 1 to {_MAX_SEED} for sentence data")
        self._objective, self._seed = objective, seed

    def build(self, dataset: WeightedDataset, num_samples: int) -> SentenceIndex:
        """Build an index of at least `num_samples` samples, in whole epochs."""
        rows = self._epoch(dataset)
        if len(rows) < num_samples:
            rows = self._mapping(dataset, num_epochs=_MAX_SEED, max_num_samples=num_samples)
        return SentenceIndex(rows)

    def build_epochs(self, dataset: WeightedDataset, epochs: Fraction) -> SentenceIndex:
        """Build an index of exactly some epochs.

        Samples of whole epochs are shuffled together. The rest of a last epoch, shuffled by another
        seed, comes after them, so that no document is seen more often than necessary.
        """
        whole = int(epochs)
        rows = [self._mapping(dataset, num_epochs=whole)] if whole else []
        if rest := epochs - whole:
            last = self._epoch(dataset, seed=self._seed % _MAX_SEED + 1)
            rows.append(last[: round(rest * len(last))])
        joined: Any = np.concatenate(rows)  # of one dtype
        return SentenceIndex(joined)

    def _epoch(self, dataset: WeightedDataset, *, seed: int | None = None) -> SampleMapping:
        rows = self._mapping(dataset, num_epochs=1, seed=seed)
        if not len(rows):
            raise UserError(
                f"{dataset.line.prefix}: no document gives a sample: a sample has "
                f"{self._objective.min_sentences} or more sentences of at most "
                f"{_LONGEST_SENTENCE} tokens; tokenize with split_sentences, or leave the dataset "
                "out"
            )
        return rows

    def _mapping(
        self,
        dataset: WeightedDataset,
        *,
        num_epochs: int,
        max_num_samples: int | None = None,
        seed: int | None = None,
    ) -> SampleMapping:
        documents = dataset.documents
        bounds = dataset.dataset.document_bounds[documents.start : documents.stop + 1]
        objective = self._objective
        return sentence_mapping(
            Sentences(np.ascontiguousarray(bounds, np.int64), dataset.dataset.lengths),
            max_seq_length=objective.target_tokens,
            seed=self._seed if seed is None else seed,
            num_epochs=num_epochs,
            max_num_samples=max_num_samples,
            short_seq_prob=objective.short_sequence_probability,
            min_num_sent=objective.min_sentences,
        )

    def warn_of_left_out(self, dataset: WeightedDataset, *, split: str) -> None:
        """Warn about documents that give no sample."""
        first, stop = dataset.documents.start, dataset.documents.stop
        bounds = np.asarray(dataset.dataset.document_bounds[first : stop + 1])
        counts = np.diff(bounds)
        too_long = dataset.dataset.lengths[bounds[0] : bounds[-1]] > _LONGEST_SENTENCE
        before = np.append(0, np.cumsum(too_long))[bounds - bounds[0]]
        has_long = (np.diff(before) > 0) & (counts > 1)
        too_few = counts < self._objective.min_sentences
        for mask, reason in (
            (has_long & ~too_few, f"have a sentence of more than {_LONGEST_SENTENCE} tokens"),
            (too_few, f"have fewer than {self._objective.min_sentences} sentences"),
        ):
            if num := int(mask.sum()):
                _log.warning(
                    "%s: %d of %d documents of the %s split are left out: they %s",
                    *(dataset.line.prefix, num, len(counts), split, reason),
                )


def count_epochs(index: SentenceIndex) -> int:
    """Epochs of an index: how often its first sample's document occurs."""
    first = index.mapping[:, 0]
    return int((first == first.min()).sum())
