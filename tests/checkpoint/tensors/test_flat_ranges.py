"""Ranges of a flattened tensor as slices, compared with numpy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamake.checkpoint.tensors.extents import Chunk, whole_slices
from tokamake.checkpoint.tensors.flat_ranges import cut, slices_of_range

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_slices_hold_the_elements_of_a_range_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = np.arange(count).reshape(shape)
    split = list(slices_of_range(shape, start, stop=stop))
    elements = [element for slices in split for element in whole[slices].reshape(-1)]
    assert elements == list(range(start, stop))
    assert len(split) <= 2 * max(len(shape), 1)


@given(SHAPES, st.integers(0, 20), st.data())
def test_a_cut_has_the_elements_of_the_stored_chunk(
    shape: tuple[int, ...], before: int, data: st.DataObject
) -> None:
    count = before + math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    # The chunk lies in a larger tensor, at 1 in each dimension.
    slices = tuple(slice(1, size + 1) for size in shape)
    chunk = Chunk("weight", slices, before)
    whole = np.zeros([size + 1 for size in shape], int)
    whole[slices] = np.arange(before, count).reshape(shape)
    elements = np.full(stop - start, -1)
    for piece in cut([chunk], start, stop):
        values = whole[piece.slices].reshape(-1)
        elements[piece.start : piece.start + len(values)] = values
    expected = np.arange(start, stop)
    assert (elements == np.where(expected < before, -1, expected)).all()


def test_only_chunks_in_the_range_are_cut() -> None:
    chunks = [Chunk("a", whole_slices((4,)), 0), Chunk("b", whole_slices((2, 2)), 4)]
    assert list(cut(chunks, 5, 8)) == [
        Chunk("b", (slice(0, 1), slice(1, 2)), 0),
        Chunk("b", (slice(1, 2), slice(0, 2)), 1),
    ]
    assert list(cut(chunks, 8, 9)) == []


def test_a_transposed_chunk_is_not_cut() -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        list(cut([Chunk("a", whole_slices((2, 2)), 0, (1, 2))], 0, 4))
