"""Samples of sentence data, compared with megatron-core's."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets import helpers

from tests.support.megatron_datasets import assert_identical
from tokamake import _csrc

ALL = 2**63 - 1
OPTIONS: dict[str, Any] = {
    **{"num_epochs": 2, "max_num_samples": ALL, "max_seq_length": 10, "seed": 1},
    **{"short_seq_prob": 0.1, "min_num_sent": 1},
}


@st.composite
def sentences(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=25))
    bounds = np.cumsum([0, *counts]).astype(np.int64)
    long = st.sampled_from([512, 513])
    length = st.one_of(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), long)
    lengths = draw(st.lists(length, min_size=int(bounds[-1]), max_size=int(bounds[-1])))
    return bounds, np.array(lengths, np.int32)


@given(
    sentences(),
    st.integers(1, 3),
    st.sampled_from([1, 20, ALL]),
    st.integers(2, 200),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(1, 2**31 - 2),
    st.integers(1, 3),
)
def test_sentence_mapping_equals_megatron(
    data: tuple[np.ndarray, np.ndarray],
    epochs: int,
    most: int,
    length: int,
    short: float,
    seed: int,
    least: int,
) -> None:
    ours = _csrc.build_mapping(
        *data,
        max_seq_length=length,
        seed=seed,
        num_epochs=epochs,
        max_num_samples=most,
        short_seq_prob=short,
        min_num_sent=least,
    )
    arguments = (epochs, most, length, short, seed, False, least)
    assert_identical(ours, helpers.build_mapping(*data, *arguments))


@given(
    sentences(),
    st.integers(1, 3),
    st.sampled_from([1, 20, ALL]),
    st.integers(2, 200),
    st.integers(1, 2**31 - 2),
    st.booleans(),
)
def test_block_mapping_equals_megatron(
    data: tuple[np.ndarray, np.ndarray],
    epochs: int,
    most: int,
    length: int,
    seed: int,
    single_sentences: bool,
) -> None:
    titles = np.random.default_rng(seed).integers(0, 30, len(data[0]) - 1).astype(np.int32)
    ours = _csrc.build_blocks_mapping(
        *data,
        titles,
        max_seq_length=length,
        seed=seed,
        num_epochs=epochs,
        max_num_samples=most,
        use_one_sent_blocks=single_sentences,
    )
    arguments = (epochs, most, length, seed, False, single_sentences)
    assert_identical(ours, helpers.build_blocks_mapping(*data, titles, *arguments))


def test_large_mappings_equal_megatron() -> None:
    random = np.random.default_rng(0)
    bounds = np.cumsum(np.append(0, random.integers(0, 40, 20_000)))
    lengths = np.minimum(random.geometric(0.04, bounds[-1]), 512).astype(np.int32)
    ours = _csrc.build_mapping(bounds, lengths, **{**OPTIONS, "max_seq_length": 509, "seed": 5})
    assert len(ours) > 50_000
    theirs = helpers.build_mapping(bounds, lengths, 2, ALL, 509, 0.1, 5, False, 1)
    assert_identical(ours, theirs)


def test_lengths_need_not_be_aligned() -> None:
    bounds = np.array([0, 3, 5], np.int64)
    lengths = np.array([5, 6, 7, 8, 9], np.int32)
    unaligned = np.frombuffer(b"x" * 34 + lengths.tobytes(), np.int32, offset=34)
    assert not unaligned.flags.aligned
    assert_identical(
        _csrc.build_mapping(bounds, unaligned, **OPTIONS),
        _csrc.build_mapping(bounds, lengths, **OPTIONS),
    )


BOUNDS = np.array([0, 2, 4], np.int64)
LENGTHS = np.array([3, 4, 5, 6], np.int32)


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("num_epochs, seed and min_num_sent start at 1", {"max_seq_length": 1}),
        ("num_epochs, seed and min_num_sent start at 1", {"seed": 0}),
        ("num_epochs, seed and min_num_sent start at 1", {"num_epochs": 0}),
        ("num_epochs, seed and min_num_sent start at 1", {"min_num_sent": 0}),
        ("short_seq_prob is 0 to 1", {"short_seq_prob": 1.5}),
        ("short_seq_prob is too small", {"short_seq_prob": 1e-12}),
        ("at least one bound", {"documents": BOUNDS[:0]}),
        ("documents' bounds decrease", {"documents": np.array([0, 3, 2, 4])}),
        ("outside the lengths", {"documents": BOUNDS + 1}),
        ("outside the lengths", {"documents": BOUNDS - 1}),
    ],
)
def test_bad_input_is_refused(message: str, changed: dict[str, Any]) -> None:
    known = {"documents": BOUNDS, "lengths": LENGTHS, **OPTIONS, **changed}
    with pytest.raises((ValueError, IndexError), match=message):
        _csrc.build_mapping(**known)


def test_each_document_has_a_title() -> None:
    options: dict[str, Any] = {**OPTIONS, "use_one_sent_blocks": False}
    for name in ("short_seq_prob", "min_num_sent"):
        del options[name]
    with pytest.raises(ValueError, match="each document has one title length"):
        _csrc.build_blocks_mapping(BOUNDS, LENGTHS, np.zeros(1, np.int32), **options)
