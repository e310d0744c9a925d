"""Counts of a mixture and exact orders of it, against fractions without rounding."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokamake.data.samples.blend import CorpusBlend, ExactBlend, requested
from tokamake.errors import UserError

WEIGHTS = st.lists(st.floats(0, 1e300), min_size=1, max_size=30).filter(any)


@example([5e-324, 1e300, 3.0], 10**12)
@given(WEIGHTS, st.integers(0, 10**15))
def test_requested_samples_add_up(weights: list[float], num_samples: int) -> None:
    counts = requested(weights, num_samples)
    assert sum(counts) == num_samples
    total = sum(map(Fraction, weights))
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - num_samples * Fraction(weight) / total) < 1


def test_requested_samples_go_to_the_largest_remainders_and_lowest_numbers() -> None:
    assert requested([1, 1, 1], 4) == [2, 1, 1]
    assert requested([0.1, 0.3, 0.6], 9) == [1, 3, 5]
    assert requested([0.0, 2.0], 3) == [0, 3]


@pytest.mark.parametrize(
    ("named", "weights", "num_samples"),
    [
        ("weights: number 1: nan", [1.0, float("nan")], 1),
        ("weights: number 0: -1", [-1.0], 1),
        ("weights: all are 0", [0.0], 1),
        ("weights: all are 0", [], 1),
        ("num_samples: -1", [1.0], -1),
    ],
)
def test_requested_refuses(named: str, weights: list[float], num_samples: int) -> None:
    with pytest.raises(UserError, match=f"^{named}"):
        requested(weights, num_samples)


def by_points(counts: list[int]) -> list[tuple[int, int]]:
    everything = [(number, k) for number, count in enumerate(counts) for k in range(count)]
    return sorted(everything, key=lambda one: (Fraction(2 * one[1] + 1, 2 * counts[one[0]]), one))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=25), st.data())
def test_exact_blend_is_ordered_by_points(counts: list[int], data: st.DataObject) -> None:
    expected = by_points(counts)
    exact = ExactBlend(counts)
    assert len(exact) == len(expected)
    assert [exact[i] for i in range(len(exact))] == expected
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
        given = np.cumsum(datasets == number)
        off = np.abs(given - share * np.arange(1, sum(counts) + 1)).max()
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
    assert exact[len(exact) - 1] == by_last_point(counts)
    assert exact[middle] == (datasets[0], samples[0])


def by_last_point(counts: list[int]) -> tuple[int, int]:
    return max(
        (Fraction(2 * count - 1, 2 * count), number, count - 1)
        for number, count in enumerate(counts)
    )[1:]


def test_exact_blend_of_a_hundred_thousand_sets() -> None:
    counts = np.random.default_rng(0).integers(1, 20, 100_000).tolist()
    exact = ExactBlend(counts)
    half = len(exact) // 2
    parts = [exact.block(0, half), exact.block(half, len(exact))]
    datasets = np.concatenate([part[0] for part in parts])
    assert datasets.dtype == np.int32
    assert np.bincount(datasets).tolist() == counts
    samples = np.concatenate([part[1] for part in parts])
    order = np.lexsort((samples, datasets))  # every sample of every set comes once
    np.testing.assert_array_equal(
        samples[order], np.concatenate([np.arange(count) for count in counts])
    )


@pytest.mark.parametrize(
    ("named", "counts"),
    [
        ("counts: number 1: -1", [1, -1]),
        ("counts: number 0: ", [2**64]),
        ("counts: .* more than", [2**53, 1]),
        ("counts: ", []),
    ],
)
def test_exact_blend_refuses(named: str, counts: list[int]) -> None:
    with pytest.raises(UserError, match=f"^{named}"):
        ExactBlend(counts)


def test_exact_blend_has_an_end() -> None:
    for sample in (-1, 3):
        with pytest.raises(IndexError):
            ExactBlend([2, 1])[sample]
    with pytest.raises(IndexError):
        ExactBlend([2, 1]).block(2, 4)


def of_corpora(
    corpora: list[list[int]], orders: list[list[tuple[int, int]]]
) -> list[tuple[int, int]]:
    """Replace the samples of the blend of corpora by files and numbers in them."""
    first = np.cumsum([0, *map(len, corpora)])
    drawn = by_points([sum(counts) for counts in corpora])
    return [
        (int(first[corpus]) + orders[corpus][k][0], orders[corpus][k][1]) for corpus, k in drawn
    ]


def end_to_end(counts: list[int]) -> list[tuple[int, int]]:
    return [(file, k) for file, count in enumerate(counts) for k in range(count)]


@pytest.mark.parametrize("within", ["concatenated", "shuffled", "blended"])
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.data()
)
def test_corpus_blend(within: str, corpora: list[list[int]], data: st.DataObject) -> None:
    orders = {
        "concatenated": [end_to_end(counts) for counts in corpora],
        "blended": [by_points(counts) for counts in corpora],
        "shuffled": [
            [end_to_end(counts)[k] for k in np.random.RandomState(7 + c).permutation(sum(counts))]
            for c, counts in enumerate(corpora)
        ],
    }[within]
    expected = of_corpora(corpora, orders)
    mixed = CorpusBlend(corpora, within=within, seed=7 if within == "shuffled" else None)
    assert [mixed[i] for i in range(len(mixed))] == expected
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    files, samples = mixed.block(start, stop)
    assert list(zip(files.tolist(), samples.tolist(), strict=True)) == expected[start:stop]


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("within: 'mixed'", {"within": "mixed"}),
        ("seed: None", {"within": "shuffled"}),
        ("seed: 1", {"within": "blended", "seed": 1}),
    ],
)
def test_corpus_blend_refuses(named: str, options: dict) -> None:
    with pytest.raises(UserError, match=f"^{named}"):
        CorpusBlend([[1]], **options)
