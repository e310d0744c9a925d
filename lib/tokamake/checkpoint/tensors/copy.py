"""Copy tensors from the files of a checkpoint into files that are laid out already.

Long ranges of bytes are copied directly. Tensors that are scattered, transposed or cast are
assembled slab by slab. Either way, memory does not grow with a tensor.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from threading import Condition
from typing import NamedTuple

import numpy as np

from tokamake.checkpoint.tensors import cast, chunks
from tokamake.checkpoint.tensors.cast import Array
from tokamake.checkpoint.tensors.chunks import ChunkReader, OpenFiles
from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype
from tokamake.checkpoint.tensors.extents import Extent, FileChunk, Slices, size_of, whole_slices
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.errors import UserError

_MIN_RANGE_BYTES = 2**14
"""Minimum contiguous range that is copied directly."""
_COPY_BYTES = 2**20
"""Bytes that are copied at once."""


def fill(
    extents: Iterable[Extent],
    source: TensorSource,
    *,
    keys: Iterable[str],
    workers: int = 1,
    not_finite: set[str] | None = None,
) -> Iterator[str]:
    """Copy whole tensors into files; yield the key of each one that is complete.

    Args:
        extents: of the files, which have their full length. Elements in no chunk stay unchanged.
        workers: number of tensors that are copied at the same time, if memory allows.
        not_finite: the keys of tensors that hold NaN or infinity are added to it.

    Raises:
        UserError: a tensor has numbers beyond the range of the target's dtype, or a file of the
            source was truncated while being read.
    """
    targets: dict[str, list[FileChunk]] = defaultdict(list)
    for extent in extents:
        for chunk in extent.chunks:
            targets[chunk.key].append((extent, chunk))
    keys = [*keys]
    # Room for the largest tensor: tensors that need to be mapped whole wait for each other.
    budget = _ElementBudget(max((math.prod(source.shapes[key]) for key in keys), default=0))
    bad_keys = set[str]() if not_finite is None else not_finite

    def copy(key: str) -> str:
        if not _copy_tensor(key, source, targets=targets[key], budget=budget):
            bad_keys.add(key)
        return key

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(copy, keys)


class _ElementBudget:
    """Limits the number of elements that all threads together have in memory."""

    def __init__(self, num_elements: int) -> None:
        self._free, self._changed = num_elements, Condition()

    @contextmanager
    def take(self, num_elements: int) -> Iterator[None]:
        """Wait until this many elements are free, and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: num_elements <= self._free)
            self._free -= num_elements
        try:
            yield
        finally:
            with self._changed:
                self._free += num_elements
                self._changed.notify_all()


def _copy_tensor(
    key: str, source: TensorSource, *, targets: Iterable[FileChunk], budget: _ElementBudget
) -> bool:
    """Copy a tensor to all its targets. Return whether all numbers are finite."""
    file_chunks, dtype = source.file_chunks(key), source.dtype(key)
    has_one_dtype = bool(file_chunks) and all(extent.dtype == dtype for extent, _ in file_chunks)
    mean: Array | None = None
    with OpenFiles() as files:
        copier = _TensorCopier(key, source, files=files, budget=budget)
        for target in targets:
            extent, chunk = target
            is_plain = has_one_dtype and extent.dtype == dtype and not chunk.is_mean
            if chunk.is_mean:
                mean = copier.mean() if mean is None else mean
                copier.fill_with_row(mean, target)
            elif is_plain and (ranges := _long_ranges(file_chunks, target)):
                for byte_range in ranges:
                    copier.copy_range(byte_range)
            else:
                copier.assemble(target)
        return copier.is_finite


class _ByteRange(NamedTuple):
    """Bytes that are contiguous in both the source and the target."""

    source: Path
    source_start: int
    target: Path
    target_start: int
    num_bytes: int


class _TensorCopier:
    """Copies one tensor.

    Attributes:
        is_finite: whether all numbers copied so far are finite.
    """

    def __init__(
        self, key: str, source: TensorSource, *, files: OpenFiles, budget: _ElementBudget
    ) -> None:
        self.is_finite = True
        self._key, self._files, self._budget = key, files, budget
        self._shape, self._dtype = source.shapes[key], source.dtype(key)
        self._file_chunks, self._source = source.file_chunks(key), source

    def copy_range(self, byte_range: _ByteRange) -> None:
        """Copy a contiguous range of bytes as it is, a block at a time."""
        source = self._files.descriptor(byte_range.source, os.O_RDONLY)
        target = self._files.descriptor(byte_range.target, os.O_RDWR)
        # copy_file_range takes twice the time: source and target rarely have the same alignment.
        buffer, num_done = np.empty(min(_COPY_BYTES, byte_range.num_bytes), "u1"), 0
        while num_done < byte_range.num_bytes:
            content = buffer[: byte_range.num_bytes - num_done]
            num_read = os.preadv(source, [content.data], byte_range.source_start + num_done)
            num_read -= num_read % self._dtype.itemsize
            if not num_read:
                raise UserError(
                    f"{byte_range.source}: was truncated while being read; fetch or write it again"
                )
            self._check_finite(content[:num_read], self._dtype)
            chunks.write(target, byte_range.target_start + num_done, content[:num_read].data)
            num_done += num_read

    def assemble(self, target: FileChunk) -> None:
        """Fill a chunk, some rows at a time."""
        _, chunk = target
        order, width = chunks.order_of(chunk), self._dtype.itemsize
        is_transposed = any(chunks.is_transposed(each) for _, each in (target, *self._file_chunks))
        row_bytes = math.prod(chunk.size) // max(1, chunk.size[order[0]]) * width if order else 0
        if not is_transposed:
            # The mapping of a chunk also covers the bytes between its elements.
            spans = [
                each.steps[0] * extent.dtype.itemsize
                for extent, each in self._file_chunks
                if each.size
            ]
            row_bytes = max([row_bytes, *spans])
        with self._budget.take(math.prod(chunk.size) if is_transposed else 0):
            tensor = self._reader(is_transposed=is_transposed)
            for slab in chunks.slabs(chunk.slices, order, row_bytes=row_bytes):
                self._write(tensor.read(slab, order), target, slices=slab, dtype=self._dtype)

    def fill_with_row(self, row: Array, target: FileChunk) -> None:
        """Fill all rows of a chunk with its columns of one fp32 row."""
        _, chunk = target
        columns = row[chunk.slices[1:]]
        for slab in chunks.slabs(chunk.slices, chunks.order_of(chunk), row_bytes=columns.nbytes):
            rows = columns.reshape(1, *columns.shape).repeat(size_of(slab)[0], axis=0)
            self._write(rows.view(f"V{FLOAT32.itemsize}"), target, slices=slab, dtype=FLOAT32)

    def mean(self) -> Array:
        """Return the mean of all rows in fp32.

        Rows are added in order in fp64; the sum is divided by their number and rounded once. So the
        result is the same on every machine, for any layout of the files.
        """
        is_transposed = any(chunks.is_transposed(chunk) for _, chunk in self._file_chunks)
        total = np.zeros(self._shape[1:], np.float64)
        slices = whole_slices(self._shape)
        row_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize
        order = (*range(len(slices)),)
        with (
            np.errstate(all="ignore"),
            self._budget.take(math.prod(self._shape) if is_transposed else 0),
        ):
            tensor = self._reader(is_transposed=is_transposed)
            for slab in chunks.slabs(slices, order, row_bytes=row_bytes):
                for row in cast.values(tensor.read(slab, order), self._dtype):
                    total += row
            return (total / self._shape[0]).astype(np.float32)

    def _reader(self, *, is_transposed: bool) -> ChunkReader:
        # Each slab of a transposed tensor touches all of a chunk: map the chunk once.
        return ChunkReader.for_tensor(
            self._source, self._key, files=self._files, map_once=is_transposed
        )

    def _write(self, elements: Array, target: FileChunk, *, slices: Slices, dtype: Dtype) -> None:
        extent, _ = target
        content = cast.converted(elements, dtype, target=extent.dtype)
        if not self._check_finite(content, extent.dtype) and extent.dtype != dtype:
            _check_range(self._key, elements, source=dtype, content=content, target=extent.dtype)
        self._files.write(target, slices, content)

    def _check_finite(self, content: Array, dtype: Dtype) -> bool:
        is_finite = cast.all_finite(content, dtype)
        self.is_finite = self.is_finite and is_finite
        return is_finite


def _check_range(
    key: str, elements: Array, *, source: Dtype, content: Array, target: Dtype
) -> None:
    """Check that no finite number of the source became infinite."""
    before, after = cast.values(elements, source), cast.values(content, target)
    if (np.isfinite(before) & ~np.isfinite(after)).any():
        wider = "bf16 or fp32" if target.name == "float16" else "fp32"
        raise UserError(f"{key}: has numbers beyond {target.short}'s range; use --dtype {wider}")


def _long_ranges(file_chunks: Iterable[FileChunk], target: FileChunk) -> list[_ByteRange]:
    """Return the ranges of bytes that make up a target, or nothing if they are too short."""
    ranges: list[_ByteRange] = []
    for file_chunk in file_chunks:
        slices = chunks.common_slices(file_chunk[1].slices, target[1].slices)
        if slices is None:
            continue
        width, outer = target[0].dtype.itemsize, [*range(len(slices))]
        steps = [[step * width for step in chunk.steps] for _, chunk in (file_chunk, target)]
        range_bytes, shape = width, size_of(slices)
        # Merge dimensions from the innermost outwards while both sides are contiguous.
        while outer and (
            shape[outer[-1]] == 1 or steps[0][outer[-1]] == steps[1][outer[-1]] == range_bytes
        ):
            range_bytes *= shape[outer.pop()]
        if outer and range_bytes < _MIN_RANGE_BYTES:
            return []
        starts = [chunks.first_byte(each, slices) for each in (file_chunk, target)]
        for index in product(*(range(shape[dim]) for dim in outer)):
            source_start, target_start = (
                start + sum(n * side[dim] for n, dim in zip(index, outer, strict=True))
                for start, side in zip(starts, steps, strict=True)
            )
            files = file_chunk[0].file, target[0].file
            ranges.append(_ByteRange(files[0], source_start, files[1], target_start, range_bytes))
    return ranges
