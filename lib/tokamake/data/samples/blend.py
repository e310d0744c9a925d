"""Mixtures: how many samples each file gives, and which sample of the mixture comes from where.

Weights come from `weights`; counts go to `index`, orders to `order_files`. `aim` reckons as
megatron-core does (BlendedMegatronDatasetBuilder, BlendedDataset) with the same weights; the exact
blends are of integers only and any sample of theirs is at hand at once.
"""

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.errors import UserError

Places = tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]
"""(samples,) numbers of datasets, int32 if int16 does not hold them, and of samples in them."""

_EXACT_BLOCK = 1 << 16
_EXACT_BLOCKS = 4  # remembered

_SURPLUS = 0.005
"""Samples that Megatron keeps ready in each file beyond its share (mid_level_dataset_surplus)."""


def normalize(weights: list[float]) -> list[float]:
    """Scale weights to add up to 1, with NumPy's order of summation as Megatron does."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


class Aim(NamedTuple):
    """What a mixture of some weights and size comes to before it is drawn."""

    shares: npt.NDArray[np.float64]
    """(files,) of the samples, as the order is drawn by them."""
    wanted: list[int]
    """Samples that Megatron asks each file for; with few samples the mixture may take more."""
    samples: int
    """Of the mixture: every file's share is rounded up."""


def aim(weights: list[float], num_samples: int) -> Aim:
    """Aim at `num_samples` at least, as Megatron does.

    Args:
        weights: above 0, at most 32,766 of them; only their proportions count.
        num_samples: samples wanted.
    """
    shares = normalize(weights)
    targets = [math.ceil(num_samples * share) for share in shares]
    wanted = [math.ceil(target * (1 + _SURPLUS)) for target in targets]
    # Megatron normalizes what is normalized already; the last bits may differ, so do the same.
    return Aim(np.array(normalize(shares)), wanted, sum(targets))


def requested(weights: list[float], num_samples: int) -> list[int]:
    """Split samples by weight, exactly: by largest remainders, in fractions without rounding.

    Args:
        weights: finite, 0 or more, not all 0; only their proportions count.
        num_samples: samples to split.

    Returns:
        Samples of each weight, which add up to `num_samples`; each is less than 1 off its exact
        share. The lowest numbers get the samples over which remainders tie.

    Raises:
        UserError: a weight or `num_samples` is out of range.
    """
    if num_samples < 0:
        raise UserError(f"num_samples: {num_samples}: out of range; give 0 or more")
    for number, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise UserError(f"weights: number {number}: {weight}: give a number of 0 or more")
    # A float is an integer over a power of 2: over the largest of these all are integers.
    ratios = [Fraction(weight) for weight in weights]
    scale = max((ratio.denominator for ratio in ratios), default=1)
    parts = [ratio.numerator * (scale // ratio.denominator) for ratio in ratios]
    total = sum(parts)
    if not total:
        raise UserError("weights: all are 0; give one above 0 at least")
    counts = [part * num_samples // total for part in parts]
    remainders = [part * num_samples % total for part in parts]
    order = sorted(range(len(parts)), key=lambda number: -remainders[number])  # is stable
    for number in order[: num_samples - sum(counts)]:
        counts[number] += 1
    return counts


class ExactBlend:
    """An order of all samples of some datasets in which each is spread evenly.

    Sample k of n stands at the point (2k + 1) / 2n; samples are ordered by points, equal ones by
    dataset. With m datasets, one that has the share p of all samples is, anywhere in the order,
    at most (1 - p) / 2 + p (m - 1) / 2 samples off its share: at most 1 if p <= 1 / (m - 2). At
    the end all are exact. `lib/csrc/exact.hpp` has the proof.
    """

    def __init__(self, counts: list[int]) -> None:
        """Take the samples that each dataset gives.

        Raises:
            UserError: there is no dataset, a count is negative, or they add up to over 2**53.
        """
        for number, count in enumerate(counts):
            if not 0 <= count <= 2**53:
                raise UserError(f"counts: number {number}: {count}: give 0 to 2**53")
        try:
            self._blend = _csrc.ExactBlend(np.array(counts, np.int64))
        except ValueError as error:
            raise UserError(f"counts: {error}") from error
        self._size = sum(counts)
        self._dtype = np.int16 if len(counts) <= np.iinfo(np.int16).max else np.int32
        self._remembered = lru_cache(_EXACT_BLOCKS)(self._numbered_block)

    def __len__(self) -> int:
        """Samples of all datasets."""
        return self._size

    def __getitem__(self, sample: int) -> tuple[int, int]:
        """Dataset and number in it of one sample; a block around it is remembered."""
        if not 0 <= sample < self._size:
            raise IndexError(f"sample {sample} of {self._size}")
        number, place = divmod(sample, _EXACT_BLOCK)
        datasets, samples = self._remembered(number)
        return int(datasets[place]), int(samples[place])

    def block(self, start: int, stop: int) -> Places:
        """Samples `start` to `stop`; costs time for all datasets as well, so ask for many."""
        datasets, samples = self._blend.block(start, stop)
        return datasets.astype(self._dtype, copy=False), samples

    def _numbered_block(self, number: int) -> Places:
        start = number * _EXACT_BLOCK
        return self.block(start, min(start + _EXACT_BLOCK, self._size))


class CorpusBlend:
    """A blend at two levels: corpora exactly, and in each corpus its files.

    In a corpus the files are laid end to end; or their samples so laid are shuffled; or they are
    blended as exactly as the corpora. Shuffling holds 8 bytes in memory for each sample.
    """

    def __init__(
        self, corpora: list[list[int]], *, within: str = "concatenated", seed: int | None = None
    ) -> None:
        """Take the samples that each file gives, by corpora.

        Args:
            corpora: samples of the files of each corpus; files are numbered through all of them.
            within: concatenated, shuffled or blended.
            seed: if shuffled, corpus c is so by numpy's RandomState(seed + c).

        Raises:
            UserError: as of `ExactBlend`, or `within` is unknown, or seed and shuffling do not go
                together.
        """
        if within not in ("concatenated", "shuffled", "blended"):
            raise UserError(f"within: {within!r}: give concatenated, shuffled or blended")
        if (seed is not None) != (within == "shuffled"):
            raise UserError(f"seed: {seed}: files are {within}; give one to shuffle, and only then")
        self._outer = ExactBlend([sum(counts) for counts in corpora])
        self._inner = [ExactBlend(counts) for counts in corpora] if within == "blended" else None
        sizes = [len(counts) for counts in corpora]
        self._first_files = np.cumsum([0, *sizes])
        # Where each file begins in its corpus, a corpus after the other.
        self._starts = [np.cumsum([0, *counts]) for counts in corpora]
        self._orders = None
        if seed is not None:
            self._orders = [
                np.random.RandomState(seed + number).permutation(sum(counts))
                for number, counts in enumerate(corpora)
            ]
        self._dtype = np.int16 if sum(sizes) <= np.iinfo(np.int16).max else np.int32

    def __len__(self) -> int:
        """Samples of all files."""
        return len(self._outer)

    def __getitem__(self, sample: int) -> tuple[int, int]:
        """File and number in it of one sample."""
        corpus, number = self._outer[sample]
        if self._inner:
            file, number = self._inner[corpus][number]
        else:
            files, numbers = self._placed(corpus, np.array([number]))
            file, number = int(files[0]), int(numbers[0])
        return int(self._first_files[corpus]) + file, number

    def block(self, start: int, stop: int) -> Places:
        """Samples `start` to `stop`; costs time for all files as well, so ask for many."""
        corpora, numbers = self._outer.block(start, stop)
        files: npt.NDArray[np.integer] = np.empty(stop - start, self._dtype)
        for corpus in np.unique(corpora).tolist():
            mine = np.flatnonzero(corpora == corpus)
            drawn = numbers[mine]  # a run without gaps: the outer blend takes them in order
            found = (
                self._inner[corpus].block(int(drawn[0]), int(drawn[-1]) + 1)
                if self._inner
                else self._placed(corpus, drawn)
            )
            files[mine] = found[0] + self._first_files[corpus]
            numbers[mine] = found[1]
        return files, numbers

    def _placed(
        self, corpus: int, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._orders:
            numbers = self._orders[corpus][numbers]
        files = np.searchsorted(self._starts[corpus], numbers, side="right") - 1
        return files, numbers - self._starts[corpus][files]
