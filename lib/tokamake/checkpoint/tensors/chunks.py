"""Read chunks of whole tensors from files, and write them to files.

Tensors are processed slab by slab, so that memory does not grow with a tensor. Only a tensor whose
rows are columns in a file is mapped whole, or as much of it as is needed.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from tokamake.checkpoint.tensors import cast
from tokamake.checkpoint.tensors.cast import Array
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import Chunk, FileChunk, Slices, size_of
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


SLAB = 2**22
"""Bytes that are assembled at once."""
_MAX_OPEN = 64
"""Open files of each thread."""
_TILE = 64
"""Rows that are transposed at once, so that they stay in the processor's cache."""
_weaving = Lock()
"""Held while single elements are written among others, which other threads may write, too."""


class OpenFiles:
    """A cache of file descriptors, least recently used first out.

    The chunks of one tensor can lie in thousands of files, more than a process may open.
    """

    def __init__(self) -> None:
        self._open = dict[tuple[Path, int], int]()

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def descriptor(self, file: Path, flags: int) -> int:
        """Return the descriptor of a file. Use it at once: later calls may close it."""
        descriptor = self._open.pop((file, flags), None)
        if descriptor is None:
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            descriptor = os.open(file, flags)
        self._open[file, flags] = descriptor
        return descriptor

    def view(self, file_chunk: FileChunk, slices: Slices) -> Array:
        """Map the elements of slices as raw bytes, with the strides that they have in the file."""
        extent, chunk = file_chunk
        width, start = extent.dtype.itemsize, first_byte(file_chunk, slices)
        shape, steps = size_of(slices), [step * width for step in chunk.steps]
        span = width + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        before = start % mmap.ALLOCATIONGRANULARITY  # a mapping begins at a page
        mapped = mmap.mmap(
            self.descriptor(extent.file, os.O_RDONLY),
            before + span,
            mmap.MAP_SHARED | mmap.MAP_POPULATE,  # all of it is read: one fault, not one a page
            mmap.PROT_READ,
            offset=start - before,
        )
        return np.ndarray(shape, f"V{width}", mapped, before, steps)

    def write(self, file_chunk: FileChunk, slices: Slices, content: Array) -> None:
        """Write the elements of slices, given contiguous in the order of the file.

        pwrite raises an error when the disk is full; a mapping would end the process by a signal.
        """
        extent, chunk = file_chunk
        shape, width = size_of(slices), extent.dtype.itemsize
        steps = [step * width for step in chunk.steps]
        outer, range_bytes = [*order_of(chunk)], width
        while outer and (shape[outer[-1]] == 1 or steps[outer[-1]] == range_bytes):
            range_bytes *= shape[outer.pop()]
        target, start = self.descriptor(extent.file, os.O_RDWR), first_byte(file_chunk, slices)
        if outer and range_bytes == width:
            _weave(target, start, content=content, strides=[steps[dim] for dim in order_of(chunk)])
            return
        unwritten = content.reshape(-1).view("u1").data
        for index in product(*(range(shape[dim]) for dim in outer)):
            offset = start + sum(n * steps[dim] for n, dim in zip(index, outer, strict=True))
            write(target, offset, unwritten[:range_bytes])
            unwritten = unwritten[range_bytes:]


def write(descriptor: int, offset: int, content: memoryview) -> None:
    """Write all bytes; pwrite may write fewer than it was asked to."""
    while content:
        num_written = os.pwrite(descriptor, content, offset)
        content, offset = content[num_written:], offset + num_written


def _weave(descriptor: int, start: int, *, content: Array, strides: Sequence[int]) -> None:
    """Write elements that are not adjacent in the file, all in one call."""
    width, counts = content.itemsize, content.shape
    span = width + sum((n - 1) * step for n, step in zip(counts, strides, strict=True))
    with _weaving:
        between = bytearray(os.pread(descriptor, span, start))
        np.ndarray(counts, content.dtype, between, strides=strides)[...] = content
        write(descriptor, start, memoryview(between))


class ChunkReader:
    """Reads slices of a whole tensor.

    Args:
        dtype: dtype of the result; chunks of other dtypes are cast.
        map_once: whether a chunk is mapped once for all reads. It pays where the slices of a read
            are scattered over a chunk, as in a transposed one.
    """

    def __init__(
        self,
        files: OpenFiles,
        file_chunks: Iterable[FileChunk],
        *,
        dtype: Dtype,
        map_once: bool = False,
    ) -> None:
        self._files, self._file_chunks = files, [*file_chunks]
        self._dtype, self._map_once = dtype, map_once
        self._mapped: dict[int, Array] = {}
        self._values: Callable[[Slices], Array] | None = None

    @staticmethod
    def for_tensor(
        source: TensorSource, key: str, *, files: OpenFiles, map_once: bool = False
    ) -> "ChunkReader":
        """Return a reader of a tensor of a checkpoint, in files or not."""
        dtype = source.dtype(key)
        reader = ChunkReader(files, source.file_chunks(key), dtype=dtype, map_once=map_once)
        if not source.is_in_files(key):
            reader._values = partial(source.values, key)
        return reader

    def read(self, slices: Slices, order: Sequence[int]) -> Array:
        """Read raw elements into an array of shape `[size_of(slices)[dim] for dim in order]`."""
        shape = size_of(slices)
        if self._values is not None:
            return np.ascontiguousarray(self._values(slices).transpose(order)).reshape(
                [shape[dim] for dim in order]
            )
        result = np.empty([shape[dim] for dim in order], f"V{self._dtype.itemsize}")
        # The same memory, with the dimensions in the tensor's own order.
        whole = result.transpose(np.argsort(order)) if order else result
        for number, (extent, chunk) in enumerate(self._file_chunks):
            if (common := common_slices(chunk.slices, slices)) is not None:
                elements = self._view(number, common)
                if extent.dtype != self._dtype:
                    raw = np.ascontiguousarray(elements).reshape(size_of(common))
                    elements = cast.converted(raw, extent.dtype, target=self._dtype)
                within = _within(common, slices)
                # numpy copies a 0-dimensional array when it is indexed.
                _copy(whole[within] if within else whole, elements)
        return result

    def _view(self, number: int, slices: Slices) -> Array:
        file_chunk = _, chunk = self._file_chunks[number]
        if not self._map_once:
            return self._files.view(file_chunk, slices)
        if number not in self._mapped:
            self._mapped[number] = self._files.view(file_chunk, chunk.slices)
        return self._mapped[number][_within(slices, chunk.slices)]


def read_tensor(source: TensorSource, key: str, *, slices: Slices, files: OpenFiles) -> "Tensor":
    """Read slices of a tensor in its dtype; no more of it is read than that."""
    import torch

    reader = ChunkReader.for_tensor(source, key, files=files)
    raw = reader.read(slices, range(len(slices)))
    flat = torch.from_numpy(raw.reshape(-1).view("u1")).view(source.dtype(key).torch)
    return flat.view(size_of(slices))


def num_not_finite(source: TensorSource, key: str) -> int:
    """Count the elements of a tensor that are NaN or infinite, some rows at a time."""
    count = 0
    with OpenFiles() as files:
        for file_chunk in source.file_chunks(key):
            extent, chunk = file_chunk
            reader = ChunkReader(files, [file_chunk], dtype=extent.dtype)
            order, row_size = order_of(chunk), 0
            if order:
                columns = math.prod(chunk.size[dim] for dim in order[1:])
                row_size = max(chunk.steps[order[0]], columns)
            for slab in slabs(chunk.slices, order, row_bytes=row_size * extent.dtype.itemsize):
                count += cast.num_not_finite(reader.read(slab, order), extent.dtype)
    return count


def _copy(target: Array, source: Array) -> None:
    if not target.ndim:
        target[...] = source
    for first in range(0, len(source), _TILE) if target.ndim else ():
        target[first : first + _TILE] = source[first : first + _TILE]


def slabs(slices: Slices, order: Sequence[int], *, row_bytes: int) -> Iterator[Slices]:
    """Split slices along the first dimension of `order` into slabs of about `SLAB` bytes."""
    if not order:
        yield slices
        return
    dim = order[0]
    rows, num_rows = slices[dim], max(1, SLAB // max(row_bytes, 1))
    for first in range(rows.start, rows.stop, num_rows):
        last = min(first + num_rows, rows.stop)
        yield (*slices[:dim], slice(first, last), *slices[dim + 1 :])


def order_of(chunk: Chunk) -> tuple[int, ...]:
    """Dimensions of a chunk, sorted by stride in its file, largest first."""
    steps = chunk.steps
    return (*sorted(range(len(steps)), key=lambda dim: (-steps[dim], dim)),)


def is_transposed(chunk: Chunk) -> bool:
    """Whether the rows of a chunk are columns in its file."""
    order = order_of(chunk)
    return order != (*range(len(order)),)


def first_byte(file_chunk: FileChunk, slices: Slices) -> int:
    """Offset in the file of slices that lie in a chunk."""
    extent, chunk = file_chunk
    pairs = zip(slices, chunk.slices, chunk.steps, strict=True)
    element = chunk.start + sum((at.start - origin.start) * step for at, origin, step in pairs)
    return extent.offset + element * extent.dtype.itemsize


def common_slices(first: Slices, second: Slices) -> Slices | None:
    """Return the intersection of two slices of a tensor; None if it is empty."""
    pairs = zip(first, second, strict=True)
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return None if any(at.start >= at.stop for at in common) else common


def _within(slices: Slices, outer: Slices) -> Slices:
    """Return slices relative to the origin of outer ones."""
    pairs = zip(slices, outer, strict=True)
    return tuple(slice(at.start - origin.start, at.stop - origin.start) for at, origin in pairs)


def check_replicas(source: TensorSource) -> None:
    """Compare all replicas bit by bit; nothing else is read."""
    for extent in source.extents:
        if not extent.is_replica:
            continue
        for chunk in extent.chunks:
            if not chunk.is_mean and not is_same(source, (extent, chunk)):
                raise UserError(
                    f"{extent.file}: replicated tensor {extent.name} differs between "
                    "ranks; use another checkpoint, or convert it with --take-first-copy"
                )


def is_same(source: TensorSource, replica: FileChunk) -> bool:
    """Whether a replica of a part of a tensor has its bits. Some rows are compared at a time."""
    extent, chunk = replica
    if extent.dtype != source.dtype(chunk.key):
        return False
    map_once = any(is_transposed(each) for _, each in (replica, *source.file_chunks(chunk.key)))
    with OpenFiles() as files:
        whole_reader = ChunkReader.for_tensor(source, chunk.key, files=files, map_once=map_once)
        replica_reader = ChunkReader(files, [replica], dtype=extent.dtype, map_once=map_once)
        order = (*range(len(chunk.slices)),)
        row_bytes = math.prod(chunk.size[1:]) * extent.dtype.itemsize
        return all(
            whole_reader.read(slab, order).tobytes() == replica_reader.read(slab, order).tobytes()
            for slab in slabs(chunk.slices, order, row_bytes=row_bytes)
        )
