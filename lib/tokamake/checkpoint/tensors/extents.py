"""Extents: ranges of bytes in files that hold chunks of whole tensors.

A format states where tensors lie (`Extent`) and where they will be written (`PlannedTensor`).
`slices_of_range` and `cut` turn ranges of a flattened tensor into chunks.
`source` assembles whole tensors on request; `copy` copies them into other files.
"""

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


Slices = tuple[slice, ...]
"""A range of indices for each dimension of a tensor."""


class Chunk(NamedTuple):
    """A slice of a whole tensor along each dimension, and how it lies in a stored tensor."""

    key: str
    """Key of the whole tensor."""
    slices: Slices
    """Where the chunk lies in the whole tensor."""
    start: int = 0
    """Element of the stored tensor where the chunk begins."""
    stride: tuple[int, ...] | None = None
    """Stride in elements of the stored tensor, by dimension of the chunk; None: contiguous."""
    is_mean: bool = False
    """Whether each row of the chunk is the mean of all rows of the whole tensor, as in padding."""

    @property
    def size(self) -> tuple[int, ...]:
        return size_of(self.slices)

    @property
    def stop(self) -> int:
        """Element of the stored tensor after the last one of the chunk."""
        size = self.size
        if not math.prod(size):
            return self.start
        steps = zip(size, self.steps, strict=True)
        return self.start + 1 + sum((count - 1) * step for count, step in steps)

    @property
    def steps(self) -> tuple[int, ...]:
        """Stride in elements, also of a contiguous chunk."""
        return dense_strides(self.size) if self.stride is None else self.stride

    def in_stack(self, index: int) -> "Chunk":
        """The chunk of a tensor that is one of a stack of tensors."""
        stride = None if self.stride is None else (1, *self.stride)
        return self._replace(slices=(slice(index, index + 1), *self.slices), stride=stride)

    def view(self, flat: "Tensor") -> "Tensor":
        """Return the chunk as a view of the flat stored tensor."""
        return flat.as_strided(self.size, self.steps, self.start)


def size_of(slices: Iterable[slice]) -> tuple[int, ...]:
    return tuple(at.stop - at.start for at in slices)


def whole_slices(shape: Iterable[int]) -> Slices:
    return tuple(slice(0, size) for size in shape)


def row_slices(rows: range, columns: tuple[int, ...]) -> Slices:
    return (slice(rows.start, rows.stop), *whole_slices(columns))


def overlap(chunks: Sequence[Slices]) -> tuple[int, int] | None:
    """Return the indices of two chunks of a tensor that have elements in common, or None."""
    if len(chunks) < 2:
        return None
    filled = [n for n, slices in enumerate(chunks) if all(at.start < at.stop for at in slices)]
    near: list[int] = []
    # Sorted by first row, a chunk is compared only with chunks that share rows with it.
    for number in sorted(filled, key=lambda n: [at.start for at in chunks[n][:1]]):
        slices = chunks[number]
        near = [n for n in near if not slices or chunks[n][0].stop > slices[0].start]
        for other in near:
            pairs = zip(slices, chunks[other], strict=True)
            if all(a.start < b.stop and b.start < a.stop for a, b in pairs):
                return other, number
        near.append(number)
    return None


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True)
class Extent:
    """A tensor in a file."""

    file: Path
    name: str
    """Name in the file, for messages."""
    offset: int
    """First byte in the file."""
    shape: tuple[int, ...]
    dtype: Dtype
    chunks: tuple[Chunk, ...] = field(default=(), hash=False)  # slices have none in Python 3.11
    """Chunks that it holds. Elements in no chunk are unused, such as padding."""
    is_replica: bool = False
    """Whether it is a replica: another extent holds the same, as for a norm on several ranks."""
    stride: tuple[int, ...] | None = None
    """Stride in elements by dimension; None: contiguous."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if self.stride is None or not self.numel:
            return self.numel * self.dtype.itemsize
        steps = zip(self.shape, self.stride, strict=True)
        return (1 + sum((size - 1) * step for size, step in steps)) * self.dtype.itemsize

    def check(self, size: int) -> None:
        """Check that a file of `size` bytes holds the extent, and the extent holds its chunks."""
        if self.offset + self.num_bytes > size:
            raise UserError(
                f"{self.file}: damaged: has {size:,} bytes, tensor {self.name} would end at "
                f"{self.offset + self.num_bytes:,}; fetch or write the file again"
            )
        end = max((chunk.stop for chunk in self.chunks), default=0)
        if end > self.numel:
            raise UserError(
                f"{self.file}: damaged: tensor {self.name} has {self.numel:,} elements, "
                f"{end:,} belong in it; fetch or write the file again"
            )

    def map(self, *, writable: bool = False) -> "Tensor":
        """Map the elements as a flat tensor. If `writable`, changes go to the file."""
        import torch

        assert self.stride is None, "call as_it_lies first"
        if not self.numel:
            return torch.empty(0, dtype=self.dtype.torch)
        before = self.offset % mmap.ALLOCATIONGRANULARITY  # a mapping begins at a page
        # Read-only memory is mapped copy-on-write: torch.frombuffer warns about read-only buffers.
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        with self.file.open("r+b" if writable else "rb") as stream:
            mapped = mmap.mmap(
                stream.fileno(), before + self.num_bytes, access=access, offset=self.offset - before
            )
        return torch.frombuffer(mapped, dtype=self.dtype.torch, count=self.numel, offset=before)

    def as_it_lies(self) -> "Extent":
        """Return the same bytes as a contiguous extent, with strided chunks."""
        if self.stride is None:
            return self
        if not self.numel:
            return replace(self, stride=None)
        chunks = (*(self._strided(chunk, self.stride) for chunk in self.chunks),)
        span = self.num_bytes // self.dtype.itemsize
        return replace(self, shape=(span,), stride=None, chunks=chunks)

    def _strided(self, chunk: Chunk, stride: tuple[int, ...]) -> Chunk:
        """Express a chunk in elements of the file, for a tensor with these strides."""
        # Stride of a dimension in the contiguous tensor that `chunk` is a view of, in elements.
        rows, remainder, last, start, steps = dense_strides(self.shape), chunk.start, [], 0, []
        for row, step in zip(rows, stride, strict=True):
            index, remainder = divmod(remainder, row)
            last.append(index)
            start += index * step
        for count, chunk_step in zip(chunk.size, chunk.steps, strict=True):
            # The outermost dimension of the tensor that divides the chunk's step.
            fitting = (
                n for n, size in enumerate(self.shape) if size > 1 and not chunk_step % rows[n]
            )
            dim = next(fitting, None)
            index = 0 if dim is None else chunk_step // rows[dim]
            steps.append(0 if dim is None else index * stride[dim])
            if dim is not None:
                last[dim] += (count - 1) * index
        if any(index >= size for index, size in zip(last, self.shape, strict=True)):
            raise UserError(
                f"{self.file}: the strides of tensor {self.name} are not supported; save it again "
                "after contiguous()"
            )
        return chunk._replace(start=start, stride=(*steps,))


FileChunk = tuple[Extent, Chunk]
"""A chunk, with the extent that holds it."""


@dataclass(frozen=True)
class PlannedTensor:
    """A contiguous tensor to be written to a file; see `Extent` for the attributes."""

    shape: tuple[int, ...]
    dtype: Dtype
    chunks: tuple[Chunk, ...]
    is_replica: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def stride(self) -> tuple[int, ...]:
        return dense_strides(self.shape)

    def extent(self, file: Path, name: str, offset: int) -> Extent:
        return Extent(file, name, offset, self.shape, self.dtype, self.chunks, self.is_replica)


def slices_of_range(shape: Sequence[int], start: int, *, stop: int) -> Iterator[Slices]:
    """Split a range of a flattened tensor into slices in order, at most two a dimension."""
    if start == stop:
        return
    if len(shape) < 2:
        # A tensor without dimensions has one element and no dimension to slice.
        yield tuple(slice(start, stop) for _ in shape)
        return
    row = math.prod(shape[1:])
    first, before = divmod(start, row)
    if before or stop - start < row:
        # The range begins within a row: first the remainder of that row, then the next rows.
        end = min(stop, (first + 1) * row)
        for slices in slices_of_range(shape[1:], before, stop=end - first * row):
            yield (slice(first, first + 1), *slices)
        yield from slices_of_range(shape, end, stop=stop)
        return
    last = stop // row
    yield (slice(first, last), *whole_slices(shape[1:]))
    yield from slices_of_range(shape, last * row, stop=stop)


def cut(chunks: Iterable[Chunk], start: int, stop: int) -> Iterator[Chunk]:
    """Cut a range out of chunks; `start` of the results counts from the range.

    Raises ValueError if a chunk that is not contiguous lies in the range in part.
    """
    for chunk in chunks:
        if chunk.stride is not None:
            if start <= chunk.start and chunk.stop <= stop:
                yield chunk._replace(start=chunk.start - start)
            elif chunk.start < stop and start < chunk.stop:
                raise ValueError("a part of a transposed chunk")
            continue
        size = chunk.size
        first = max(start, chunk.start)
        last = max(first, min(stop, chunk.start + math.prod(size)))
        position = first - start
        for slices in slices_of_range(size, first - chunk.start, stop=last - chunk.start):
            yield chunk._replace(slices=_shifted(slices, chunk.slices), start=position)
            position += math.prod(size_of(slices))


def _shifted(slices: Slices, origin: Slices) -> Slices:
    pairs = zip(origin, slices, strict=True)
    return tuple(slice(at.start + own.start, at.start + own.stop) for at, own in pairs)
