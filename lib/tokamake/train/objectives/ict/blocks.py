"""Index of blocks: groups of whole sentences of a document, as Megatron-LM cuts them for ICT."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.dataset_indexers import (
    SampleMapping,
    SentenceDatasetIndexer,
    WeightedDataset,
)
from tokamake.data.samples.index_options import IndexSettings


class BlockSettings(NamedTuple):
    """Everything that decides the samples of the objective ict, as index.json has it."""

    name: str
    target_tokens: int
    """Most tokens of a title and the text of a block."""
    titles: str
    text: str
    query_in_block_probability: float
    one_sentence_documents: bool
    tokenizer: str
    """Fingerprint of the tokenizer."""
    tokens: dict[str, int]
    """Special tokens by their use: pad, cls, sep."""

    @property
    def max_title_tokens(self) -> int:
        """Tokens of a title that are used: at most half a block. Megatron-LM fails at a title that
        fills a block."""
        return self.target_tokens // 2


class BlockIndexer(SentenceDatasetIndexer):
    """Indexes of blocks; rows equal megatron-core's `build_blocks_mapping`."""

    def __init__(self, settings: IndexSettings, *, epochs_of: Mapping[str, Fraction]) -> None:
        assert settings.objective is not None, "it is not the default objective"
        self._blocks = BlockSettings(**settings.objective)
        min_sentences = 1 if self._blocks.one_sentence_documents else 2
        super().__init__(settings, epochs_of=epochs_of, min_sentences=min_sentences)

    def _map(
        self, dataset: WeightedDataset, bounds: npt.NDArray[np.int64], **options: int
    ) -> SampleMapping:
        lengths = np.zeros(len(dataset.documents), np.int32)
        if dataset.companion is not None:
            titles = title_lengths(dataset.companion, dataset.documents)
            lengths = np.minimum(titles, self._blocks.max_title_tokens, dtype=np.int32)
        rows = _csrc.build_blocks_mapping(
            bounds,
            dataset.dataset.lengths,
            lengths,
            max_seq_length=self._blocks.target_tokens,
            use_one_sent_blocks=self._blocks.one_sentence_documents,
            **options,
        )
        # Documents count from the first one of the dataset, not of the split.
        rows[:, 2] += rows.dtype.type(dataset.documents.start)
        return rows


def with_special_tokens(
    text: npt.NDArray[Any],
    title: npt.NDArray[Any] | None,
    *,
    tokens: Mapping[str, int],
    length: int,
) -> npt.NDArray[np.int64]:
    """[CLS] title [SEP] text [SEP], or without a title [CLS] text [SEP]; text is cut to fit.

    Args:
        tokens: special tokens: cls, sep.
        length: most tokens.
    """
    head = [tokens["cls"]] if title is None else [tokens["cls"], *title.tolist(), tokens["sep"]]
    parts = [np.array(head), text[: length - len(head) - 1], np.array([tokens["sep"]])]
    return np.concatenate(parts).astype(np.int64)


def title_of(titles: IndexedDataset, document: int) -> npt.NDArray[Any]:
    """Tokens of the title of a document, of all its sequences."""
    first, end = titles.document_bounds[document : document + 2].tolist()
    parts = [titles[sequence] for sequence in range(first, end)]
    title: npt.NDArray[Any] = np.concatenate([np.zeros(0, titles.dtype), *parts])
    return title


def title_lengths(titles: IndexedDataset, documents: range) -> npt.NDArray[np.int64]:
    """(documents,) tokens of each title, of all its sequences."""
    bounds = titles.document_bounds[documents.start : documents.stop + 1]
    before = np.append(0, np.cumsum(titles.lengths[bounds[0] : bounds[-1]], dtype=np.int64))
    lengths: npt.NDArray[np.int64] = np.diff(before[bounds - bounds[0]])
    return lengths
