"""Chunks of tensors and their place in files, compared with torch."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import (
    Chunk,
    Extent,
    PlannedTensor,
    cut,
    overlap,
    slices_of_range,
    whole_slices,
)
from tokamake.errors import UserError

WHOLE = whole_slices((2, 3))
SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def extent(**changes: object) -> Extent:
    settings = {"file": Path("f"), "name": "w", "offset": 8, "shape": (2, 3), "dtype": FLOAT32}
    return Extent(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chunk", "steps", "stop"),
    [
        (Chunk("w", WHOLE, 5), (3, 1), 11),
        (Chunk("w", WHOLE, 5, (1, 2)), (1, 2), 11),
        (Chunk("w", (slice(4, 4), slice(0, 3)), 5), (3, 1), 5),
        (Chunk("w", (), 5), (), 6),
    ],
)
def test_a_chunk_knows_its_strides_and_its_end(
    chunk: Chunk, steps: tuple[int, ...], stop: int
) -> None:
    assert (chunk.steps, chunk.stop) == (steps, stop)


def test_a_chunk_is_a_view_of_the_stored_tensor() -> None:
    flat = torch.arange(12)
    assert Chunk("w", WHOLE, 5).view(flat).tolist() == [[5, 6, 7], [8, 9, 10]]
    assert Chunk("w", WHOLE, 5, (1, 2)).view(flat).tolist() == [[5, 7, 9], [6, 8, 10]]


def test_chunks_that_share_an_element_are_found() -> None:
    rows, columns = (slice(0, 2), slice(2, 5)), (slice(0, 1), slice(1, 2))
    grid = list(itertools.product(rows, columns))
    assert overlap(grid) is None
    assert overlap([]) is None
    assert overlap([WHOLE]) is None
    assert sorted(overlap([*grid, (slice(4, 9), slice(0, 1))]) or ()) == [2, 4]
    # Elements without dimensions: two of them are the same one.
    assert overlap([(), ()]) == (0, 1)


def test_an_empty_chunk_overlaps_nothing() -> None:
    assert overlap([WHOLE, (slice(1, 1), slice(0, 3))]) is None


def test_an_extent_must_lie_in_its_file() -> None:
    assert extent().num_bytes == 24
    extent().check(32)
    with pytest.raises(UserError, match="f: damaged: has 31 bytes, tensor w would end at 32"):
        extent().check(31)


def test_chunks_must_lie_in_their_extent() -> None:
    extent(chunks=(Chunk("w", WHOLE),)).check(32)
    with pytest.raises(UserError, match="tensor w has 6 elements, 7 belong in it"):
        extent(chunks=(Chunk("w", WHOLE, 1),)).check(32)


def test_a_strided_extent_ends_with_its_last_element() -> None:
    assert extent(stride=(4, 1)).num_bytes == (1 + 4 + 2) * 4
    assert extent(stride=(4, 1), shape=(0, 3)).num_bytes == 0


@pytest.mark.parametrize("writable", [False, True])
def test_elements_are_mapped_from_any_byte(tmp_path: Path, writable: bool) -> None:
    path = tmp_path / "file"
    values = torch.arange(6, dtype=torch.float32)
    path.write_bytes(b"x" * 5000 + values.numpy().tobytes() + b"end")
    mapped = extent(file=path, offset=5000).map(writable=writable)
    assert mapped.tolist() == values.tolist()
    mapped[1] = 9.0
    stored = torch.frombuffer(bytearray(path.read_bytes()[5000:5024]), dtype=torch.float32)
    assert stored[1] == (9.0 if writable else 1.0)
    assert path.read_bytes()[5024:] == b"end"


def test_an_extent_without_elements_needs_no_file() -> None:
    assert extent(file=Path("none"), shape=(0, 3)).map().shape == (0,)


@pytest.mark.parametrize("stride", [(3, 1), (1, 2), (5, 1), (1, 4)])
def test_a_strided_extent_is_the_same_as_a_contiguous_one(stride: tuple[int, int]) -> None:
    """Chunks are rows 0 and 1, and the transposed last two columns, of the tensor."""
    memory = torch.arange(20)
    tensor = memory.as_strided((2, 3), stride)
    chunks = (
        Chunk("first", (slice(0, 1), slice(0, 3)), 0),
        Chunk("last", (slice(0, 1), slice(0, 3)), 3),
        Chunk("turned", (slice(0, 2), slice(0, 2)), 1, (1, 3)),
    )
    plain = extent(stride=stride, chunks=chunks).as_it_lies()
    assert plain.stride is None
    views = tensor[:1], tensor[1:], tensor[:, 1:].T
    for chunk, expected in zip(plain.chunks, views, strict=True):
        assert torch.equal(chunk.view(memory), expected), chunk.key
        assert chunk.stop <= plain.numel


def test_a_chunk_across_the_rows_of_a_strided_extent_is_refused() -> None:
    chunk = Chunk("w", (slice(0, 4),), 0)  # four elements: one and a third rows
    with pytest.raises(UserError, match="f: the strides of tensor w are not supported"):
        extent(stride=(5, 1), chunks=(chunk,)).as_it_lies()


def test_a_contiguous_or_empty_extent_needs_no_change() -> None:
    assert extent().as_it_lies() == extent()
    empty = extent(shape=(0, 3), stride=(1, 7)).as_it_lies()
    assert (empty.stride, empty.numel) == (None, 0)


def test_a_planned_tensor_becomes_an_extent() -> None:
    chunk = Chunk("w", WHOLE)
    planned = PlannedTensor((2, 3), FLOAT32, (chunk,), is_replica=True)
    assert (planned.numel, planned.num_bytes, planned.stride) == (6, 24, (3, 1))
    assert planned.extent(Path("f"), "w", 8) == extent(chunks=(chunk,), is_replica=True)


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


def test_a_transposed_chunk_is_kept_whole_or_left_out() -> None:
    chunk = Chunk("a", whole_slices((2, 2)), 4, (1, 2))
    assert list(cut([chunk], 3, 8)) == [chunk._replace(start=1)]
    assert list(cut([chunk], 0, 4)) == list(cut([chunk], 8, 9)) == []
    for start, stop in ((5, 8), (0, 7)):
        with pytest.raises(ValueError, match="transposed"):
            list(cut([chunk], start, stop))
