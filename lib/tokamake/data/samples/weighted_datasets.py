"""Datasets of a split with their weights, and which of their documents belong to it."""

from typing import NamedTuple

from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.mixture.weights import WeightedPrefix


class WeightedDataset(NamedTuple):
    """A dataset of a split."""

    line: WeightedPrefix
    dataset: IndexedDataset
    documents: range
    """Documents that belong to the split; they hold at least one token. For the objective causal,
    each sequence counts as a document."""
    has_sentences: bool = False
    """Whether a document has several sequences: its sentences."""

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
