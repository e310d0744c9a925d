"""Blends: how many samples each dataset gives, and in which order.

`plan_blend` computes as megatron-core does (BlendedMegatronDatasetBuilder, BlendedDataset). The
exact blends use integers only. `draw` writes orders in blocks.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.errors import UserError

OrderBlock = tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]
"""(samples,) dataset numbers, int16 or int32, and (samples,) sample numbers in the datasets."""

_SURPLUS = 0.005
"""Extra samples that Megatron requests from each dataset (mid_level_dataset_surplus)."""


def normalize(weights: list[float]) -> list[float]:
    """Scale weights to a sum of 1. NumPy's order of summation gives the same bits as Megatron."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


class BlendPlan(NamedTuple):
    """Sizes of a weighted blend before it is drawn."""

    shares: npt.NDArray[np.float64]
    """(datasets,) shares of the samples, which decide the order."""
    requested: list[int]
    """Samples that Megatron requests from each dataset; a small blend may draw more."""
    samples: int
    """Samples of the blend: the sum of the shares, each rounded up."""


def plan_blend(weights: list[float], num_samples: int) -> BlendPlan:
    """Plan a blend of at least `num_samples` samples as Megatron does.

    At most 32,766 `weights` above 0; only their ratios count.
    """
    shares = normalize(weights)
    targets = [math.ceil(num_samples * share) for share in shares]
    requested = [math.ceil(target * (1 + _SURPLUS)) for target in targets]
    # Megatron normalizes twice. The second time may change the last bits, and with them the order.
    return BlendPlan(np.array(normalize(shares)), requested, sum(targets))


def apportion(weights: list[float], num_samples: int) -> list[int]:
    """Divide samples by weight with the largest remainder method, in exact fractions.

    Weights are finite, 0 or more and not all 0; only their ratios count. The samples of the weights
    add up to `num_samples`, and each differs by less than 1 from its exact share. If remainders are
    equal, the lowest numbers get the extra samples.
    """
    # A float is an integer divided by a power of 2. Times the largest power, all weights
    # are integers.
    ratios = [Fraction(weight) for weight in weights]
    scale = max((ratio.denominator for ratio in ratios), default=1)
    scaled = [ratio.numerator * (scale // ratio.denominator) for ratio in ratios]
    total = sum(scaled)
    counts = [weight * num_samples // total for weight in scaled]
    remainders = [weight * num_samples % total for weight in scaled]
    # The sort is stable: equal remainders stay in the order of their numbers.
    order = sorted(range(len(scaled)), key=lambda number: -remainders[number])
    for number in order[: num_samples - sum(counts)]:
        counts[number] += 1
    return counts


class ExactBlend:
    """Order of all samples of some datasets, at most 2**53, with each dataset spread evenly.

    Sample k of n stands at the point (2k + 1) / 2n. Samples are ordered by points, and by dataset
    if points are equal. Let m be the number of datasets and p the share of one of them. At every
    position of the order, that dataset is at most (1 - p) / 2 + p (m - 1) / 2 samples off its
    share: at most 1 if p <= 1 / (m - 2). At the end all counts are exact. The proof is in
    `lib/csrc/exact.hpp`.
    """

    def __init__(self, counts: list[int]) -> None:
        try:
            self._blend = _csrc.ExactBlend(np.array(counts, np.int64))
        except ValueError as error:
            raise UserError(f"counts: {error}") from error
        self._size = sum(counts)
        self._dtype = _dataset_dtype(len(counts))

    def __len__(self) -> int:
        return self._size

    def block(self, start: int, stop: int) -> OrderBlock:
        """Samples `start` to `stop`. Each call visits all datasets, so prefer large blocks."""
        datasets, samples = self._blend.block(start, stop)
        return datasets.astype(self._dtype, copy=False), samples


class CorpusBlend:
    """Two-level blend: corpora exactly, and the datasets inside each corpus in another way.

    Inside a corpus, datasets are concatenated, or their concatenated samples are shuffled, or they
    are blended as exactly as the corpora. Datasets are numbered across corpora. To shuffle, corpus
    c uses numpy's RandomState(seed + c), with 8 bytes in memory for each sample.
    """

    def __init__(self, corpora: list[list[int]], *, within: str, seed: int) -> None:
        self._outer = ExactBlend([sum(counts) for counts in corpora])
        self._inner = [ExactBlend(counts) for counts in corpora] if within == "blended" else None
        num_datasets = [len(counts) for counts in corpora]
        self._first_datasets = np.cumsum([0, *num_datasets])
        # Start of each dataset in its corpus, for each corpus.
        self._starts = [np.cumsum([0, *counts]) for counts in corpora]
        self._permutations = None
        if within == "shuffled":
            self._permutations = [
                np.random.RandomState(seed + number).permutation(sum(counts))
                for number, counts in enumerate(corpora)
            ]
        self._dtype = _dataset_dtype(sum(num_datasets))

    def __len__(self) -> int:
        return len(self._outer)

    def block(self, start: int, stop: int) -> OrderBlock:
        """Samples `start` to `stop`. Each call visits all datasets, so prefer large blocks."""
        corpora, numbers = self._outer.block(start, stop)
        datasets: npt.NDArray[np.integer] = np.empty(stop - start, self._dtype)
        for corpus in np.unique(corpora).tolist():
            positions = np.flatnonzero(corpora == corpus)
            # Consecutive numbers: the outer blend takes the samples of a corpus in order.
            of_corpus = numbers[positions]
            inner_datasets, inner_numbers = (
                self._inner[corpus].block(int(of_corpus[0]), int(of_corpus[-1]) + 1)
                if self._inner
                else self._locate(corpus, of_corpus)
            )
            datasets[positions] = inner_datasets + self._first_datasets[corpus]
            numbers[positions] = inner_numbers
        return datasets, numbers

    def _locate(
        self, corpus: int, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._permutations:
            numbers = self._permutations[corpus][numbers]
        datasets = np.searchsorted(self._starts[corpus], numbers, side="right") - 1
        return datasets, numbers - self._starts[corpus][datasets]


def _dataset_dtype(num_datasets: int) -> type[np.int16] | type[np.int32]:
    # Megatron stores dataset numbers in int16; int32 only where that overflows.
    return np.int16 if num_datasets <= np.iinfo(np.int16).max else np.int32
