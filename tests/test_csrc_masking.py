"""Random numbers of the C++ masking against numpy's, and what its samplers refuse."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamake import _csrc

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.lists(st.sampled_from(["random", "randint", "geometric", "choice", "shuffle"])))
def test_numbers_equal_those_of_numpy(seed: int, calls: list[str]) -> None:
    """Any sequence of calls: each must leave the generator in numpy's state."""
    ours, theirs = _csrc.RandomState(seed), np.random.RandomState(seed)
    p = np.array([0.5, 0.3, 0.2])
    cumulative = p.cumsum()
    cumulative /= cumulative[-1]
    for number, call in enumerate(calls):
        match call:
            case "random":
                assert ours.random() == theirs.random()
            case "randint":
                high = [2, 3, 17, 1000, 2**31 - 1][number % 5]
                assert ours.randint(1, high) == theirs.randint(1, high)
            case "geometric":
                assert ours.geometric(0.2) == theirs.geometric(0.2)
            case "choice":
                assert ours.choice(cumulative.tolist()) == theirs.choice(3, p=p)
            case "shuffle":
                values = list(range(number * 7))
                shuffled = ours.permutation(values)
                theirs.shuffle(values)
                assert shuffled == values


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_many_numbers_equal_those_of_numpy(seed: int) -> None:
    """The twister makes 624 words at a time."""
    ours, theirs = _csrc.RandomState(seed), np.random.RandomState(seed)
    assert [ours.random() for _ in range(2000)] == theirs.random_sample(2000).tolist()
    assert [ours.geometric(0.2) for _ in range(20_000)] == theirs.geometric(0.2, 20_000).tolist()
    values = list(range(3000))
    shuffled = ours.permutation(values)
    theirs.shuffle(values)
    assert shuffled == values


def test_bounds_of_integers() -> None:
    random = _csrc.RandomState(3)
    assert random.randint(5, 6) == 5
    for low, high in ((1, 1), (2, 1), (0, 2**32)):
        with pytest.raises(ValueError, match="high is above low"):
            random.randint(low, high)


PIECES = np.array([2, 2, 0, 1, 0, 0, 0, 0], np.uint8)
MASKED: dict[str, Any] = {
    **{"probability": 0.15, "max_ngram": 2, "cumulative": np.array([0.5, 1.0])},
    **{"pad": 5, "cls": 0, "sep": 1, "mask": 4, "random": [2, 3], "in_two": True},
}
SPANS: dict[str, Any] = {
    **{"probability": 0.5, "max_ngram": 2, "stop_probability": 0.2},
    **{"pad": 5, "bos": 0, "eos": 1, "sentinels": [6, 7]},
}
TOKENS = np.array([2, 3, 4, 2, 4], np.int32)
LENGTHS = np.array([2, 3], np.int32)


@pytest.mark.parametrize(
    "changed",
    [
        {"probability": 0.0},
        {"probability": 1.0},
        {"max_ngram": 0},
        {"cumulative": np.array([1.0])},
        {"random": []},
    ],
)
def test_masked_samplers_refuse(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        _csrc.MaskedSampler(PIECES, **MASKED | changed)


@pytest.mark.parametrize("changed", [{"stop_probability": 0.5}, {"max_ngram": 0}])
def test_span_samplers_refuse(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        _csrc.SpanSampler(PIECES, **SPANS | changed)


@pytest.mark.parametrize(
    ("tokens", "lengths", "size", "error"),
    [
        (TOKENS, LENGTHS[:1], 27, "do not add up"),
        (TOKENS[:2], LENGTHS[:1], 27, "needs two sentences"),
        (TOKENS, np.array([6, -1], np.int32), 27, "negative length"),
        (TOKENS, LENGTHS, 24, "longer than its row"),
        (TOKENS, LENGTHS, 26, "another size"),
        (TOKENS + 4, LENGTHS, 27, "not in the vocabulary"),
        (TOKENS.reshape(5, 1), LENGTHS, 27, "one dimension"),
    ],
)
def test_a_masked_sample_that_does_not_fit_is_refused(
    tokens: np.ndarray, lengths: np.ndarray, size: int, error: str
) -> None:
    sampler = _csrc.MaskedSampler(PIECES, **MASKED)
    row = np.zeros(27, np.int64)
    sampler.write(TOKENS, LENGTHS, target=5, seed=1, row=row)
    with pytest.raises((ValueError, IndexError), match=error):
        sampler.write(tokens, lengths, target=5, seed=1, row=np.zeros(size, np.int64))


@pytest.mark.parametrize(
    ("tokens", "decoder", "size", "error"),
    [
        (TOKENS, 2, 12, "decoder's row is too short"),
        (TOKENS, 0, 8, "row is too short"),
        (TOKENS, 6, 16, "longer than its row"),
        (TOKENS + 4, 6, 20, "not in the vocabulary"),
    ],
)
def test_a_corrupted_sample_that_does_not_fit_is_refused(
    tokens: np.ndarray, decoder: int, size: int, error: str
) -> None:
    sampler = _csrc.SpanSampler(PIECES, **SPANS)
    sampler.write(TOKENS, target=5, seed=1, decoder_length=6, row=np.zeros(20, np.int64))
    with pytest.raises((ValueError, IndexError), match=error):
        row = np.zeros(size, np.int64)
        sampler.write(tokens, target=5, seed=1, decoder_length=decoder, row=row)


def test_more_spans_than_sentinels_are_refused() -> None:
    sampler = _csrc.SpanSampler(PIECES, **SPANS | {"max_ngram": 1, "sentinels": [6]})
    tokens = np.full(8, 2, np.int32)
    with pytest.raises(ValueError, match="more spans than sentinels"):
        sampler.write(tokens, target=8, seed=1, decoder_length=20, row=np.zeros(60, np.int64))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_sizes_are_those_of_the_samples(dtype: type) -> None:
    sampler = _csrc.SpanSampler(PIECES, **SPANS | {"sentinels": list(range(6, 106))})
    tokens = np.random.default_rng(0).choice([2, 3, 4], 400).astype(dtype)
    starts, counts = np.arange(0, 200, 5), np.arange(10, 50).astype(np.int32)
    sizes = sampler.sizes(tokens, starts=starts, counts=counts, targets=counts, seed=2**32 - 20)
    assert sizes.shape == (40, 2)
    for number, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        row = np.zeros(60 + 2 * 80 + 3, np.int64)
        part = tokens[start : start + count].astype(np.int32)
        seed = (2**32 - 20 + number) % 2**32
        sampler.write(part, target=count, seed=seed, decoder_length=80, row=row)
        assert sizes[number, 0] == row[-2]
        assert sizes[number, 1] == (row[:60] >= 6).sum()
    with pytest.raises(IndexError, match="outside the tokens"):
        sampler.sizes(tokens, starts=starts + 390, counts=counts, targets=counts, seed=1)
    with pytest.raises(ValueError, match="uint16 or int32"):
        sampler.sizes(tokens.astype(np.int64), starts=starts, counts=counts, targets=counts, seed=1)
