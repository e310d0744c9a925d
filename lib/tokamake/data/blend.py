"""Mixtures: how many samples each file gives, and which sample of the mixture comes from where.

Weights come from `weights`; counts and arrays go to `index`. Both equal megatron-core's
(BlendedMegatronDatasetBuilder, BlendedDataset) for the same weights.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc

_BLOCK = 1 << 20

_SURPLUS = 0.005
"""Samples that Megatron keeps ready in each file beyond its share (mid_level_dataset_surplus)."""


class Blend(NamedTuple):
    """A mixture of samples."""

    dataset_index: npt.NDArray[np.int16]
    """(samples,) number of the file that each sample comes from."""
    dataset_sample_index: npt.NDArray[np.int64]
    """(samples,) number of the sample in that file: 0, 1, 2, ... as drawn."""
    wanted: list[int]
    """Samples that Megatron asks each file for."""
    drawn: list[int]
    """Samples that the mixture takes from each file; with few samples this may exceed `wanted`."""


def normalize(weights: list[float]) -> list[float]:
    """Scale weights to add up to 1, with NumPy's order of summation as Megatron does."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def blend(weights: list[float], num_samples: int) -> Blend:
    """Mix at least `num_samples` samples: every file's share is rounded up.

    Args:
        weights: above 0, at most 32,766 of them; only their proportions count.
        num_samples: samples wanted.
    """
    shares = normalize(weights)
    targets = [math.ceil(num_samples * share) for share in shares]
    wanted = [math.ceil(target * (1 + _SURPLUS)) for target in targets]
    # Megatron normalizes what is normalized already; the last bits may differ, so do the same.
    again = np.array(normalize(shares))
    dataset_index, dataset_sample_index = _csrc.build_blend_index(again, sum(targets))
    return Blend(dataset_index, dataset_sample_index, wanted, _counts(dataset_index, len(weights)))


def _counts(dataset_index: npt.NDArray[np.int16], num_datasets: int) -> list[int]:
    # By blocks, for bincount widens its input to eight bytes an entry.
    counts = np.zeros(num_datasets, np.int64)
    for start in range(0, len(dataset_index), _BLOCK):
        counts += np.bincount(dataset_index[start : start + _BLOCK], minlength=num_datasets)
    return counts.tolist()
