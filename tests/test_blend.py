"""Counts and order of a mixture against megatron-core's builder and BlendedDataset."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import (
    _get_size_per_split_per_dataset,
)
from megatron.core.datasets.utils import normalize
from oracle import assert_identical

from tokamake.data.blend import blend


# Normalizing these shares once more changes their last bits, and with them the order.
@example([13.0, 10.0, 6.0, 6.0, 1.0, 2.0, 1.0, 4.0, 16.0, 13.0], 200)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), st.integers(1, 3000))
def test_blend_equals_megatron(weights: list[float], num_samples: int) -> None:
    ours = blend(weights, num_samples)
    shares = normalize(weights)
    targets = [one for (one,) in _get_size_per_split_per_dataset(shares, [num_samples])]
    wanted = _get_size_per_split_per_dataset(shares, [num_samples], surplus=0.005)
    assert ours.wanted == [one for (one,) in wanted]
    size = sum(targets)
    datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    again = normalize(shares)
    helpers.build_blending_indices(datasets, samples, again, len(again), size, False)
    assert_identical(ours.dataset_index, datasets)
    assert_identical(ours.dataset_sample_index, samples)
    assert ours.drawn == [int((datasets == n).sum()) for n in range(len(weights))]


def test_shares_are_kept() -> None:
    mixed = blend([6, 3, 1], 10_000)
    assert len(mixed.dataset_index) == 10_000
    assert mixed.drawn == pytest.approx([6000, 3000, 1000], abs=1)


def test_counting_goes_on_beyond_one_block() -> None:
    mixed = blend([1, 3], 3_000_000)
    assert mixed.drawn == [750_000, 2_250_000]
