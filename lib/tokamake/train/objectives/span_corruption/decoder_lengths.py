"""Check of span corruption before training: do decoder and sentinels suffice for every sample?

Masking depends on the seed and the number of a sample alone, so `index` measures the samples that
the run will draw. It measures nothing if even the worst case fits.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.dataset_indexers import (
    MaskingIndexer,
    SampleMapping,
    SentenceIndex,
    WeightedDataset,
)
from tokamake.data.samples.sentence_masking import SentenceMasking
from tokamake.errors import UserError
from tokamake.train.objectives._sentences import max_masked
from tokamake.train.objectives.span_corruption.samples import make_sampler

_BLOCK = 1 << 14  # samples


class _Longest(NamedTuple):
    decoder: int
    decoder_sample: int
    spans: int
    spans_sample: int


class SpanIndexer(MaskingIndexer):
    """Indexes of sentences; it also measures the samples."""

    def check(
        self, dataset: WeightedDataset, index: SentenceIndex, *, drawn: int, split: str
    ) -> None:
        """Warn about documents without a sample; check the decoder's length."""
        super().check(dataset, index, drawn=drawn, split=split)
        check_decoder_lengths(
            dataset,
            index.mapping[:drawn],
            objective=self.masking,
            pieces=self.pieces,
            seed=self.seed,
        )


def check_decoder_lengths(
    dataset: WeightedDataset,
    rows: SampleMapping,
    *,
    objective: SentenceMasking,
    pieces: npt.NDArray[np.uint8],
    seed: int,
) -> None:
    """Check that each (samples, 3) row of a dataset fits the decoder and has enough sentinels."""
    worst = max_masked(objective.probability, objective.target_tokens)
    limits = objective.decoder_sequence_length, len(objective.sentinels)
    if not len(rows) or (1 + 2 * worst <= limits[0] and worst <= limits[1]):
        return
    longest = _measure(dataset.dataset, rows, objective=objective, pieces=pieces, seed=seed)
    prefix = dataset.line.prefix
    if longest.decoder > limits[0]:
        raise UserError(
            f"train.masking.decoder_sequence_length: {limits[0]}: sample {longest.decoder_sample} "
            f"of {prefix} needs {longest.decoder}; give {longest.decoder} or more ({1 + 2 * worst} "
            "is enough for every sample), or a lower train.masking.probability"
        )
    if longest.spans > limits[1]:
        raise UserError(
            f"tokenizer: has {limits[1]} sentinels: sample {longest.spans_sample} of {prefix} "
            f"needs {longest.spans}; append more with tokenizer.sentinels ({worst} are enough for "
            "every sample), or give a shorter train.sequence_length"
        )


def _measure(
    dataset: IndexedDataset,
    rows: SampleMapping,
    *,
    objective: SentenceMasking,
    pieces: npt.NDArray[np.uint8],
    seed: int,
) -> _Longest:
    tokens = dataset.tokens
    if tokens.dtype not in (np.uint16, np.int32):
        tokens = tokens.astype(np.int32)

    def of_block(first: int) -> npt.NDArray[np.int32]:
        starts, counts, targets = _extents(dataset, rows[first : first + _BLOCK])
        return make_sampler(objective, pieces).sizes(
            tokens, starts=starts, counts=counts, targets=targets, seed=(seed + first) % 2**32
        )

    # Threads suffice: `sizes` releases the interpreter lock.
    firsts = range(0, len(rows), _BLOCK)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sizes = np.concatenate([*pool.map(of_block, firsts)])
    decoder, spans = sizes.argmax(axis=0).tolist()
    return _Longest(int(sizes[decoder, 0]), decoder, int(sizes[spans, 1]), spans)


def _extents(
    dataset: IndexedDataset, rows: SampleMapping
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(samples,) first token, number of tokens and target of samples, whose sentences are
    neighbors in the dataset."""
    first, last = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64) - 1
    itemsize = np.dtype(dataset.dtype).itemsize
    starts = dataset.pointers[first] // itemsize
    stops = dataset.pointers[last] // itemsize + dataset.lengths[last]
    targets = rows[:, 2].astype(np.int32)
    return starts, np.minimum(stops - starts, targets).astype(np.int32), targets
