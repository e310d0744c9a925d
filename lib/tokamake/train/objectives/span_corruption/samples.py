"""Samples of the objective span_corruption, as T5 learns from them (arXiv 1910.10683).

A sample is the beginning of some sentences of a document. A sentinel replaces each span of masked
words in the encoder; the decoder restores the spans. Numbers are drawn as in megatron-core's
T5MaskedWordPieceDataset, so its samples are equal, except that labels without loss are -100.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.samples.sentence_masking import ABSENT, WORD, SentenceMasking
from tokamake.data.samples.sentence_samples import SentenceSample, SentenceSamples

_STOP_PROBABILITY = 0.2
"""Parameter of the geometric distribution of the words of a span: SpanBERT, arXiv 1907.10529."""


def span_record(sequence_length: int, decoder_length: int) -> np.dtype[np.void]:
    """Fields of a sample of L tokens of the encoder and M of the decoder.

    tokens: (L,) text with sentinels, then [PAD].
    decoder_tokens: (M,) [BOS], then sentinels and spans, then [PAD].
    labels: (M,) sentinels and spans, then [EOS], then -100.
    num_tokens, num_decoder_tokens: tokens that are not padding.
    is_truncated: 1 if tokens did not fit.
    """
    decoder = [(name, np.int64, (decoder_length,)) for name in ("decoder_tokens", "labels")]
    numbers = [(name, np.int64) for name in ("num_tokens", "num_decoder_tokens", "is_truncated")]
    return np.dtype([("tokens", np.int64, (sequence_length,)), *decoder, *numbers])


class SpanCorruptionSamples(SentenceSamples):
    """Samples of one split; a sample has the fields of `span_record`."""

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        super().__init__(folder, split=split, data_root=data_root, verify=verify)
        self.record = span_record(self.sequence_length, self.objective.decoder_sequence_length)
        self._sampler = make_sampler(self.objective, self._pieces)

    def _write(self, sentences: SentenceSample, row: npt.NDArray[np.int64]) -> None:
        self._sampler.write(
            sentences.tokens,
            target=sentences.target,
            seed=sentences.seed,
            decoder_length=self.objective.decoder_sequence_length,
            row=row,
        )


def make_sampler(objective: SentenceMasking, pieces: npt.NDArray[np.uint8]) -> _csrc.SpanSampler:
    """Make a sampler for one thread; `pieces` (vocabulary,) has the kind of each token."""
    tokens = objective.tokens
    return _csrc.SpanSampler(
        np.where(pieces == ABSENT, np.uint8(WORD), pieces),
        probability=objective.probability,
        max_ngram=objective.max_ngram,
        stop_probability=_STOP_PROBABILITY,
        pad=tokens["pad"],
        bos=tokens["bos"],
        eos=tokens["eos"],
        sentinels=objective.sentinels,
    )
