"""Boxes of whole tensors, read from the files that have parts of them and written to others.

They are gone through slab by slab, so that memory does not grow with a tensor: only those of which
rows lie as columns somewhere are mapped, in the part that is wanted.
"""

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokamake.checkpoint.tensors import cast
from tokamake.checkpoint.tensors.cast import Array
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[slice, ...]
Part = tuple[Extent, Chunk]

SLAB = 2**22
"""Bytes that are put together at once."""
_MOST_OPEN = 64
"""Files that are open at a time, of each thread."""
_TILE = 64
"""Rows that are transposed at once, so that they stay in the processor's cache."""


class OpenFiles:
    """Files that are open, each once, the last ones used: a tensor can have parts in thousands.

    Args:
        stack: what closes them.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._open = dict[tuple[Path, int], int]()
        stack.callback(self._close)

    def descriptor(self, file: Path, flags: int) -> int:
        """Of a file; good until that of another one is asked for twice."""
        found = self._open.pop((file, flags), None)
        if found is None:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            found = os.open(file, flags)
        self._open[file, flags] = found
        return found

    def _close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def view(self, part: Part, box: Box) -> Array:
        """Elements of a box as they lie in a file, which is mapped; what they mean, none asks."""
        region, block = part
        width, start = region.dtype.itemsize, first_byte(part, box)
        shape, steps = size(box), [step * region.dtype.itemsize for step in block.steps]
        span = width + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        before = start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self.descriptor(region.file, os.O_RDONLY),
            before + span,
            mmap.MAP_SHARED | mmap.MAP_POPULATE,  # all of it is read: one fault, not one a page
            mmap.PROT_READ,
            offset=start - before,
        )
        return np.ndarray(shape, f"V{width}", mapped, before, steps)

    def write(self, part: Part, box: Box, content: Array) -> None:
        """Write elements of a box, which lie one after the other in the order of the file.

        Written, not mapped: a full disk is an error then, not a signal.
        """
        region, block = part
        shape, width = size(box), region.dtype.itemsize
        steps = [step * width for step in block.steps]
        outer, run = [*order_of(block)], width
        while outer and (shape[outer[-1]] == 1 or steps[outer[-1]] == run):
            run *= shape[outer.pop()]
        target, start = self.descriptor(region.file, os.O_RDWR), first_byte(part, box)
        left = content.reshape(-1).view("u1").data
        for at in product(*(range(shape[dim]) for dim in outer)):
            place = start + sum(n * steps[dim] for n, dim in zip(at, outer, strict=True))
            write(target, place, left[:run])
            left = left[run:]


def write(target: int, start: int, content: memoryview) -> None:
    """Write bytes to a descriptor."""
    while content:
        written = os.pwrite(target, content, start)
        content, start = content[written:], start + written


class ChunkReader:
    """A whole tensor of which boxes are read.

    Args:
        files: what its files are open in.
        parts: of the tensor.
        dtype: number format to read it in; parts may have others.
        across: whether parts are mapped once for all boxes, since each box is all over a part.
    """

    def __init__(
        self, files: OpenFiles, parts: Iterable[Part], dtype: Dtype, *, across: bool = False
    ) -> None:
        self._files, self._parts, self._dtype, self._across = files, [*parts], dtype, across
        self._mapped: dict[int, Array] = {}
        self._given: Array | None = None

    @staticmethod
    def of(
        source: TensorSource, key: str, files: OpenFiles, *, across: bool = False
    ) -> "ChunkReader":
        """A tensor of a checkpoint."""
        made = ChunkReader(files, source.parts(key), source.dtype(key), across=across)
        if (value := source.given.get(key)) is not None:
            made._given = (
                np.asarray(value, "<f4").view("V4")
                if isinstance(value, float)
                else _bytes_of(value.contiguous(), source.dtype(key))
            )
        return made

    def read(self, box: Box, order: Sequence[int]) -> Array:
        """Bytes of the elements of a box, one after the other.

        Args:
            box: which elements.
            order: its dimensions, the one whose elements are furthest apart first.
        """
        if self._given is not None:
            return np.ascontiguousarray(self._given[box].transpose(order)).reshape(
                [size(box)[dim] for dim in order]
            )
        shape = size(box)
        made = np.empty([shape[dim] for dim in order], f"V{self._dtype.itemsize}")
        whole = made.transpose(np.argsort(order)) if order else made
        for number, (region, block) in enumerate(self._parts):
            if (common := common_box(block.place, box)) is not None:
                found = self._view(number, common)
                if region.dtype != self._dtype:
                    found = cast.converted(
                        np.ascontiguousarray(found).reshape(size(common)), region.dtype, self._dtype
                    )
                within = _within(common, box)
                # Indexed, what has no dimensions would be a copy.
                _copy(whole[within] if within else whole, found)
        return made

    def _view(self, number: int, box: Box) -> Array:
        part = _, block = self._parts[number]
        if not self._across:
            return self._files.view(part, box)
        if number not in self._mapped:
            self._mapped[number] = self._files.view(part, block.place)
        return self._mapped[number][_within(box, block.place)]


def num_not_finite(source: TensorSource, key: str) -> int:
    """How many numbers that a tensor has in files are NaN or infinite; few rows are read at once.

    Args:
        source: has it.
        key: of it.
    """
    count = 0
    with ExitStack() as stack:
        files = OpenFiles(stack)
        for part in source.parts(key):
            region, block = part
            tensor, order, rows = ChunkReader(files, [part], region.dtype), order_of(block), 0
            if order:
                rows = max(block.steps[order[0]], math.prod(block.size[at] for at in order[1:]))
            for slab in slabs(block.place, order, rows * region.dtype.itemsize):
                count += cast.num_not_finite(tensor.read(slab, order), region.dtype)
    return count


def _bytes_of(tensor: "Tensor", dtype: Dtype) -> Array:
    """Bytes of the elements of a contiguous tensor of torch, whose memory they share."""
    import torch

    found: Array = tensor.reshape(-1).view(torch.uint8).numpy().view(f"V{dtype.itemsize}")
    return found.reshape(tensor.shape)


def _copy(target: Array, source: Array) -> None:
    if not target.ndim:
        target[...] = source
    for first in range(0, len(source), _TILE) if target.ndim else ():
        target[first : first + _TILE] = source[first : first + _TILE]


def slabs(place: Box, order: Sequence[int], row_bytes: int) -> Iterator[Box]:
    """A box in pieces of some rows each: as many as are a slab, at least one.

    Args:
        place: the box.
        order: its dimensions; of the first, some elements are taken at once.
        row_bytes: bytes of one of these.
    """
    if not order:
        yield place
        return
    dim = order[0]
    rows, each = place[dim], max(1, SLAB // max(row_bytes, 1))
    for first in range(rows.start, rows.stop, each):
        yield (*place[:dim], slice(first, min(first + each, rows.stop)), *place[dim + 1 :])


def order_of(block: Chunk) -> tuple[int, ...]:
    """Dimensions of a block, the one whose elements are furthest apart in its file first."""
    steps = block.steps
    return (*sorted(range(len(steps)), key=lambda dim: (-steps[dim], dim)),)


def turns(block: Chunk) -> bool:
    """Whether rows of a block lie as columns in its file."""
    order = order_of(block)
    return order != (*range(len(order)),)


def first_byte(part: Part, box: Box) -> int:
    """Where a box, which is in a block, begins in a file."""
    region, block = part
    pairs = zip(box, block.place, block.steps, strict=True)
    element = block.start + sum((own.start - at.start) * step for own, at, step in pairs)
    return region.offset + element * region.dtype.itemsize


def size(box: Iterable[slice]) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(at.stop - at.start for at in box)


def common_box(one: Box, other: Box) -> Box | None:
    """What is in both boxes, if anything is."""
    pairs = zip(one, other, strict=True)
    found = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return None if any(at.start >= at.stop for at in found) else found


def _within(box: Box, whole: Box) -> Box:
    """Where a box is in a larger one."""
    pairs = zip(box, whole, strict=True)
    return tuple(slice(own.start - at.start, own.stop - at.start) for own, at in pairs)
