"""Sample counts and exact blends, compared with exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokamake.data.samples.blend import CorpusBlend, ExactBlend, apportion
from tokamake.errors import UserError

WEIGHTS = st.lists(st.floats(0, 1e300), min_size=1, max_size=30).filter(any)


@example([5e-324, 1e300, 3.0], 10**12)
@given(WEIGHTS, st.integers(0, 10**15))
def test_apportioned_samples_add_up(weights: list[float], num_samples: int) -> None:
    counts = apportion(weights, num_samples)
    assert sum(counts) == num_samples
    total = sum(map(Fraction, weights))
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - num_samples * Fraction(weight) / total) < 1


def test_largest_remainders_and_lowest_numbers_get_the_extra_samples() -> None:
    assert apportion([1, 1, 1], 4) == [2, 1, 1]
    assert apportion([0.1, 0.3, 0.6], 9) == [1, 3, 5]
    assert apportion([0.0, 2.0], 3) == [0, 3]


def by_points(counts: list[int]) -> list[tuple[int, int]]:
    """All (dataset, sample) in the order of an exact blend, computed with fractions."""
    samples = [(number, k) for number, count in enumerate(counts) for k in range(count)]
    return sorted(samples, key=lambda pair: (Fraction(2 * pair[1] + 1, 2 * counts[pair[0]]), pair))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=25), st.data())
def test_exact_blend_is_ordered_by_points(counts: list[int], data: st.DataObject) -> None:
    expected = by_points(counts)
    exact = ExactBlend(counts)
    assert len(exact) == len(expected)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    datasets, samples = exact.block(start, stop)
    assert datasets.dtype == np.int16
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == expected[start:stop]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any))
def test_exact_blend_stays_close_to_its_shares(counts: list[int]) -> None:
    datasets, _ = ExactBlend(counts).block(0, sum(counts))
    for number, count in enumerate(counts):
        share = count / sum(counts)
        drawn = np.cumsum(datasets == number)
        off = np.abs(drawn - share * np.arange(1, sum(counts) + 1)).max()
        assert off <= (1 - share) / 2 + share * (len(counts) - 1) / 2 + 1e-9
    assert np.bincount(datasets, minlength=len(counts)).tolist() == counts


def test_exact_blend_of_two_trillion_samples() -> None:
    counts = [2**40, 3 * 2**39 + 1, 2**39, 7]  # products of these need more than 64 bits
    exact = ExactBlend(counts)
    middle = len(exact) // 3
    datasets, samples = exact.block(middle, middle + 1000)
    points = [
        Fraction(2 * k + 1, 2 * counts[number])
        for number, k in zip(datasets.tolist(), samples.tolist(), strict=True)
    ]
    assert points == sorted(points)
    for number, count in enumerate(counts[:3]):
        drawn = samples[datasets == number]
        np.testing.assert_array_equal(np.diff(drawn), 1)
        assert abs(drawn[0] - middle * count / len(exact)) <= 2
    last = exact.block(len(exact) - 1, len(exact))
    assert (last[0][0], last[1][0]) == last_by_points(counts)


def last_by_points(counts: list[int]) -> tuple[int, int]:
    return max(
        (Fraction(2 * count - 1, 2 * count), number, count - 1)
        for number, count in enumerate(counts)
    )[1:]


def test_exact_blend_of_100_000_datasets() -> None:
    counts = np.random.default_rng(0).integers(1, 20, 100_000).tolist()
    exact = ExactBlend(counts)
    half = len(exact) // 2
    blocks = [exact.block(0, half), exact.block(half, len(exact))]
    datasets = np.concatenate([block[0] for block in blocks])
    assert datasets.dtype == np.int32
    assert np.bincount(datasets).tolist() == counts
    samples = np.concatenate([block[1] for block in blocks])
    order = np.lexsort((samples, datasets))  # every sample of every dataset, once
    np.testing.assert_array_equal(
        samples[order], np.concatenate([np.arange(count) for count in counts])
    )


@pytest.mark.parametrize(
    ("message", "counts"),
    [
        ("counts: .* negative", [1, -1]),
        ("counts: .* more than", [2**53, 1]),
        ("counts: ", []),
    ],
)
def test_exact_blend_refuses_counts_out_of_range(message: str, counts: list[int]) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        ExactBlend(counts)


def test_samples_beyond_the_exact_blend_are_an_index_error() -> None:
    with pytest.raises(IndexError):
        ExactBlend([2, 1]).block(2, 4)


def blended_corpora(
    corpora: list[list[int]], orders: list[list[tuple[int, int]]]
) -> list[tuple[int, int]]:
    """Order of a blend of corpora, with the order inside each corpus."""
    first = np.cumsum([0, *map(len, corpora)])
    drawn = by_points([sum(counts) for counts in corpora])
    return [
        (int(first[corpus]) + orders[corpus][k][0], orders[corpus][k][1]) for corpus, k in drawn
    ]


def concatenated(counts: list[int]) -> list[tuple[int, int]]:
    return [(dataset, k) for dataset, count in enumerate(counts) for k in range(count)]


@pytest.mark.parametrize("within", ["concatenated", "shuffled", "blended"])
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.data()
)
def test_corpus_blend_equals_nested_orders(
    within: str, corpora: list[list[int]], data: st.DataObject
) -> None:
    orders = {
        "concatenated": [concatenated(counts) for counts in corpora],
        "blended": [by_points(counts) for counts in corpora],
        "shuffled": [
            [concatenated(counts)[k] for k in np.random.RandomState(7 + c).permutation(sum(counts))]
            for c, counts in enumerate(corpora)
        ],
    }[within]
    expected = blended_corpora(corpora, orders)
    blend = CorpusBlend(corpora, within=within, seed=7)
    assert len(blend) == len(expected)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    datasets, samples = blend.block(start, stop)
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == expected[start:stop]
