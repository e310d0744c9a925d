"""The C++ index and blend builders against megatron-core's, and their refusal of bad input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets import helpers
from oracle import assert_identical

from tokamake import _csrc


@st.composite
def shuffled_documents(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any))
    epochs = draw(st.integers(1, 4))
    order = draw(st.permutations(list(range(len(lengths))) * epochs))
    return np.array(lengths, np.int32), np.array(order, np.int32), epochs


@given(shuffled_documents(), st.integers(1, 50))
def test_sample_index_equals_megatron(
    documents: tuple[np.ndarray, np.ndarray, int], sequence_length: int
) -> None:
    lengths, order, epochs = documents
    arguments = (lengths, order, sequence_length, epochs, int(lengths.sum()))
    assert_identical(_csrc.build_sample_index(*arguments), helpers.build_sample_idx(*arguments))
    theirs = helpers.build_sample_idx_int64(*arguments, True, 1)
    assert_identical(_csrc.build_sample_index(*arguments, wide=True), theirs)


def test_sample_index_reads_unaligned_lengths() -> None:
    lengths = np.random.default_rng(0).integers(0, 90, 500).astype(np.int32)
    unaligned = np.frombuffer(b"x" * 34 + lengths.tobytes(), np.int32, offset=34)
    assert not unaligned.flags.aligned
    order = np.random.default_rng(1).permutation(500).astype(np.int32)
    arguments = (order, 64, 1, int(lengths.sum()))
    assert_identical(
        _csrc.build_sample_index(unaligned, *arguments),
        helpers.build_sample_idx(lengths, *arguments),
    )


LENGTHS = np.array([3, 4, 5], np.int32)
ORDER = np.arange(3, dtype=np.int32)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (IndexError, (LENGTHS, np.array([0, 3], np.int32), 2, 1, 12)),
        (IndexError, (LENGTHS, np.array([-1], np.int32), 2, 1, 12)),
        (ValueError, (-LENGTHS, ORDER, 2, 1, 12)),
        (ValueError, (LENGTHS, ORDER, 2, 2, 12)),  # documents of one epoch only
        (ValueError, (LENGTHS, ORDER[:0], 2, 1, 12)),
        (ValueError, (LENGTHS, ORDER, 0, 1, 12)),
        (ValueError, (LENGTHS, ORDER, 2, 0, 12)),
        (ValueError, (LENGTHS, ORDER, 2, 1, 0)),
        (ValueError, (LENGTHS, ORDER, 2, 2**40, 2**40)),
        (ValueError, (LENGTHS.reshape(3, 1), ORDER, 2, 1, 12)),
        (TypeError, (LENGTHS.astype(np.int64), ORDER, 2, 1, 12)),
        (TypeError, (LENGTHS, np.repeat(ORDER, 2)[::2], 2, 1, 12)),
    ],
)
def test_sample_index_refuses(error: type[Exception], arguments: tuple) -> None:
    with pytest.raises(error):
        _csrc.build_sample_index(*arguments)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), st.integers(0, 3000))
def test_blend_equals_megatron(weights: list[float], size: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(datasets, samples, shares, len(shares), size, False)
    ours = _csrc.build_blend_index(shares, size)
    assert_identical(ours[0], datasets)
    assert_identical(ours[1], samples)


def test_blend_gives_a_tie_to_the_lowest_number() -> None:
    datasets, _ = _csrc.build_blend_index(np.full(3, 1 / 3), 6)
    assert datasets.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("error", "weights", "size"),
    [
        (ValueError, np.zeros(0), 1),
        (ValueError, np.ones(2**15), 1),
        (ValueError, np.array([0.5, -0.5]), 1),
        (ValueError, np.array([np.nan]), 1),
        (ValueError, np.array([np.inf]), 1),
        (ValueError, np.ones((1, 1)), 1),
        (ValueError, np.ones(1), -1),
        (TypeError, np.ones(1, np.float32), 1),
    ],
)
def test_blend_refuses(error: type[Exception], weights: np.ndarray, size: int) -> None:
    with pytest.raises(error):
        _csrc.build_blend_index(weights, size)
