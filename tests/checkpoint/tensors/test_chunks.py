"""Chunks of tensors in files, read and written slab by slab, compared with numpy."""

import os
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tokamake.checkpoint.tensors import chunks
from tokamake.checkpoint.tensors.chunks import ChunkReader, OpenFiles, common_slices, slabs
from tokamake.checkpoint.tensors.dtypes import FLOAT32, OF_WEIGHTS, Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent, whole_slices
from tokamake.checkpoint.tensors.source import TensorSource

SHAPE = (3, 4, 5)
WHOLE = np.arange(60, dtype="<f4").reshape(SHAPE)


@pytest.fixture
def opened() -> Iterator[OpenFiles]:
    with OpenFiles() as files:
        yield files


def store(path: Path, array: Any, chunk: Chunk, *, offset: int = 0, dtype: Dtype = FLOAT32) -> Any:
    """Write an array after some bytes; return it as a chunk of the tensor."""
    path.write_bytes(b"x" * offset + np.ascontiguousarray(array).tobytes())
    return Extent(path, "tensor", offset, array.shape, dtype, (chunk,)), chunk


def read(reader: ChunkReader, slices: Any, order: Any = (0, 1, 2)) -> Any:
    return reader.read(slices, order).view("<f4")


def test_a_tensor_is_assembled_from_parts_at_any_offset(tmp_path: Path, opened: OpenFiles) -> None:
    file_chunks = [
        store(
            tmp_path / f"{start}.bin",
            WHOLE[:, start:stop],
            Chunk("w", (slice(0, 3), slice(start, stop), slice(0, 5))),
            offset=offset,
        )
        for start, stop, offset in ((0, 1, 0), (1, 4, 5000))
    ]
    reader = ChunkReader(opened, file_chunks, dtype=FLOAT32)
    assert (read(reader, whole_slices(SHAPE)) == WHOLE).all()
    slices = (slice(1, 3), slice(0, 2), slice(2, 5))
    assert (read(reader, slices) == WHOLE[slices]).all()
    for order in permutations(range(3)):
        assert (read(reader, slices, order) == WHOLE[slices].transpose(order)).all()


@pytest.mark.parametrize("map_once", [False, True])
def test_a_transposed_part_has_the_elements_of_the_tensor(
    tmp_path: Path, opened: OpenFiles, map_once: bool
) -> None:
    # In the file: dimensions 2, 0, 1.
    chunk = Chunk("w", whole_slices(SHAPE), 0, (4, 1, 12))
    file_chunk = store(tmp_path / "a.bin", WHOLE.transpose(2, 0, 1), chunk)
    assert chunks.is_transposed(chunk)
    assert chunks.order_of(chunk) == (2, 0, 1)
    reader = ChunkReader(opened, [file_chunk], dtype=FLOAT32, map_once=map_once)
    for slices in (whole_slices(SHAPE), (slice(1, 2), slice(1, 4), slice(0, 3))):
        assert (read(reader, slices) == WHOLE[slices]).all()


def test_parts_of_another_dtype_are_cast(tmp_path: Path, opened: OpenFiles) -> None:
    values = WHOLE.astype("<f2")
    chunk = Chunk("w", whole_slices(SHAPE))
    file_chunk = store(tmp_path / "a.bin", values, chunk, dtype=OF_WEIGHTS["fp16"])
    reader = ChunkReader(opened, [file_chunk], dtype=FLOAT32)
    assert (read(reader, whole_slices(SHAPE)) == WHOLE).all()


@pytest.mark.parametrize("map_once", [False, True])
def test_a_chunk_is_mapped_once_if_asked(
    tmp_path: Path, opened: OpenFiles, map_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_chunk = store(tmp_path / "a.bin", WHOLE, Chunk("w", whole_slices(SHAPE)))
    view, mapped = opened.view, list[Any]()
    monkeypatch.setattr(opened, "view", lambda *which: (mapped.append(which[1]), view(*which))[1])
    reader = ChunkReader(opened, [file_chunk], dtype=FLOAT32, map_once=map_once)
    rows = [(slice(row, row + 1), slice(0, 4), slice(0, 5)) for row in range(3)]
    for slices in rows:
        assert (read(reader, slices) == WHOLE[slices]).all()
    assert mapped == ([whole_slices(SHAPE)] if map_once else rows)


def test_a_tensor_and_a_number_in_memory_are_read_without_files(opened: OpenFiles) -> None:
    memory = {"w": torch.from_numpy(WHOLE.copy()).mT, "n": 2.5}  # a view that is not contiguous
    source = TensorSource([], {}, in_memory=memory)
    slices = (slice(1, 3), slice(0, 2), slice(1, 4))
    reader = ChunkReader.for_tensor(source, "w", files=opened)
    for order in permutations(range(3)):
        expected = WHOLE.transpose(0, 2, 1)[slices].transpose(order)
        assert (read(reader, slices, order) == expected).all()
    number = ChunkReader.for_tensor(source, "n", files=opened)
    assert read(number, (), ()) == 2.5


@pytest.mark.parametrize(
    "slices",
    [
        (slice(1, 3), slice(0, 3), slice(1, 5)),
        (slice(0, 2), slice(1, 2), slice(1, 5)),
        whole_slices(SHAPE),
    ],
)
@pytest.mark.parametrize("stride", [None, (4, 1, 12), (1, 15, 3), (40, 10, 2)])
def test_a_written_slice_changes_its_elements_only(
    tmp_path: Path, opened: OpenFiles, stride: tuple[int, ...] | None, slices: Any
) -> None:
    chunk = Chunk("w", whole_slices(SHAPE), 0, stride)
    path = tmp_path / "a.bin"
    file_chunk = store(path, np.zeros(120, "<f4"), chunk, offset=4)
    order = chunks.order_of(chunk)
    content = np.ascontiguousarray(WHOLE[slices].transpose(order)).view("V4")
    opened.write(file_chunk, slices, content)
    expected = np.zeros(SHAPE, "<f4")
    expected[slices] = WHOLE[slices]
    assert (
        read(ChunkReader(opened, [file_chunk], dtype=FLOAT32), whole_slices(SHAPE)) == expected
    ).all()
    assert path.read_bytes()[:4] == b"xxxx"
    assert path.stat().st_size == 4 + 480
    assert np.count_nonzero(np.fromfile(path, "<f4", offset=4)) == np.count_nonzero(expected)


def test_a_part_without_dimensions_is_one_element(tmp_path: Path, opened: OpenFiles) -> None:
    file_chunk = store(tmp_path / "a.bin", np.float32(7), Chunk("w", ()))
    assert read(ChunkReader(opened, [file_chunk], dtype=FLOAT32), (), ()) == 7


def num_open() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_MAX_OPEN", 2)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
    before = num_open()
    with OpenFiles() as files:
        for path in [*paths, paths[0], paths[2]]:
            assert os.pread(files.descriptor(path, os.O_RDONLY), 9, 0) == path.name.encode()
            assert num_open() <= before + 2
        last = files.descriptor(paths[2], os.O_RDONLY)
        assert files.descriptor(paths[2], os.O_RDONLY) == last
    assert num_open() == before


def test_a_write_goes_on_until_all_bytes_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bytes, int]] = []

    def pwrite(_: int, content: memoryview, offset: int) -> int:
        calls.append((bytes(content), offset))
        return min(2, len(content))

    monkeypatch.setattr(os, "pwrite", pwrite)
    chunks.write(3, 10, memoryview(b"abcde"))
    assert calls == [(b"abcde", 10), (b"cde", 12), (b"e", 14)]


@given(st.integers(0, 5), st.integers(0, 40), st.integers(0, 2 * chunks.SLAB))
@example(0, 3, 2 * chunks.SLAB)
def test_slabs_cover_slices_once_with_few_bytes(start: int, rows: int, row_bytes: int) -> None:
    slices = (slice(0, 2), slice(start, start + rows))
    split = list(slabs(slices, (1, 0), row_bytes=row_bytes))
    assert [row for _, slab in split for row in range(slab.start, slab.stop)] == list(
        range(start, start + rows)
    )
    assert all(first == slice(0, 2) for first, _ in split)
    assert all(
        slab.stop - slab.start == 1 or (slab.stop - slab.start) * row_bytes <= chunks.SLAB
        for _, slab in split
    )


def test_slices_that_only_touch_have_nothing_in_common() -> None:
    slices = (slice(0, 2), slice(2, 6))
    assert common_slices(slices, (slice(1, 3), slice(0, 4))) == (slice(1, 2), slice(2, 4))
    assert common_slices(slices, (slice(2, 3), slice(0, 9))) is None
    assert common_slices((), ()) == ()


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    values = WHOLE.copy()
    values[0, 1, 2], values[2, 3, 4], values[1, 0, 0] = np.nan, np.inf, -np.inf
    chunk = Chunk("w", whole_slices(SHAPE))
    file_chunk = store(tmp_path / "a.bin", values, chunk)

    class Source:
        def file_chunks(self, key: str) -> list[Any]:
            assert key == "w"
            return [file_chunk, file_chunk]

    source: Any = Source()
    assert chunks.num_not_finite(source, "w") == 6
