"""Samples of the objective masked, as BERT learns from them (arXiv 1810.04805).

A sample has one or two parts of a document. Some of its words are masked, always as a whole. Half
of the samples with two parts swap them: the model learns the order of sentences (arXiv 1909.11942).
Samples equal megatron-core's BERTMaskedWordPieceDataset, with two differences: labels
without loss are -100, and only tokens after `num_tokens` are padding. megatron-core also takes a
[PAD] for padding that masking drew as a random token.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.samples.sentence_masking import (
    ABSENT,
    WORD,
    SentenceMasking,
    ngram_probabilities,
)
from tokamake.data.samples.sentence_samples import SentenceSample, SentenceSamples


def masked_record(sequence_length: int) -> np.dtype[np.void]:
    """Fields of a sample of L tokens.

    tokens: (L,) some of them masked, then [PAD].
    types: (L,) 0 up to the first [SEP], then 1; 0 for padding.
    labels: (L,) tokens before masking, -100 where nothing is masked.
    num_tokens: tokens that are not padding.
    is_swapped: 1 if the second part comes first.
    is_truncated: 1 if tokens did not fit.
    """
    arrays = [(name, np.int64, (sequence_length,)) for name in ("tokens", "types", "labels")]
    numbers = [(name, np.int64) for name in ("num_tokens", "is_swapped", "is_truncated")]
    return np.dtype([*arrays, *numbers])


class MaskedSamples(SentenceSamples):
    """Samples of one split; a sample has the fields of `masked_record`."""

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        super().__init__(folder, split=split, data_root=data_root, verify=verify)
        self.record = masked_record(self.sequence_length)
        self._sampler = make_sampler(self.objective, self._pieces)

    def _write(self, sentences: SentenceSample, row: npt.NDArray[np.int64]) -> None:
        self._sampler.write(
            sentences.tokens,
            sentences.lengths,
            target=sentences.target,
            seed=sentences.seed,
            row=row,
        )


def make_sampler(objective: SentenceMasking, pieces: npt.NDArray[np.uint8]) -> _csrc.MaskedSampler:
    """Make a sampler for one thread; `pieces` (vocabulary,) has the kind of each token."""
    tokens = objective.tokens
    return _csrc.MaskedSampler(
        np.where(pieces == ABSENT, np.uint8(WORD), pieces),
        probability=objective.probability,
        max_ngram=objective.max_ngram,
        cumulative=ngram_probabilities(objective.max_ngram),
        pad=tokens["pad"],
        cls=tokens["cls"],
        sep=tokens["sep"],
        mask=tokens["mask"],
        random=np.flatnonzero(pieces != ABSENT).tolist(),
        in_two=objective.sentence_order,
    )
