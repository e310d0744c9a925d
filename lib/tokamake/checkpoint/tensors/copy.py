"""Brings tensors from the files of a checkpoint into files that are laid out already.

Bytes that stay together are read and written, block by block; what comes apart, comes together, is
transposed or gets another number format is put in order slab by slab.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from threading import Condition
from typing import NamedTuple

import numpy as np

from tokamake.checkpoint.tensors import cast, chunks
from tokamake.checkpoint.tensors.cast import Array
from tokamake.checkpoint.tensors.chunks import ChunkReader, OpenFiles, Part
from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype
from tokamake.checkpoint.tensors.extents import Extent, TensorSource
from tokamake.errors import UserError

_LONG = 2**14
"""Bytes that stay together from which on they are copied by themselves."""
_BLOCK = 2**20
"""Bytes that are copied at once."""


def fill(
    regions: Iterable[Extent],
    source: TensorSource,
    *,
    keys: Iterable[str],
    workers: int = 1,
    unsound: set[str] | None = None,
) -> Iterator[str]:
    """Bring whole tensors into files, and name each that is there.

    Args:
        regions: of the files, which are there in full length; what no block covers stays as it is.
        source: what to write.
        keys: of the tensors that are wanted.
        workers: tensors that are moved at once, if there is room for them.
        unsound: gets the keys of those in which a number is NaN or infinite.

    Raises:
        UserError: a tensor has numbers that its format in the files cannot hold, or a file of the
            source got shorter.
    """
    targets: dict[str, list[Part]] = defaultdict(list)
    for region in regions:
        for block in region.blocks:
            targets[block.key].append((region, block))
    wanted = [*keys]
    room = _Room(max((math.prod(source.shapes[key]) for key in wanted), default=0))
    found = set[str]() if unsound is None else unsound

    def move(key: str) -> str:
        _move(key, source, targets[key], room, found)
        return key

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(move, wanted)


class _Room:
    """Room in memory for the largest tensor, or for several that are together no larger.

    Args:
        most: elements.
    """

    def __init__(self, most: int) -> None:
        self._left, self._changed = most, Condition()

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Have room for so many elements."""
        with self._changed:
            self._changed.wait_for(lambda: size <= self._left)
            self._left -= size
        try:
            yield
        finally:
            with self._changed:
                self._left += size
                self._changed.notify_all()


def _move(
    key: str, source: TensorSource, targets: Iterable[Part], room: _Room, unsound: set[str]
) -> None:
    """Bring a tensor to where it is wanted."""
    parts, dtype = source.parts(key), source.dtype(key)
    as_it_is = bool(parts) and all(region.dtype == dtype for region, _ in parts)
    mean: Array | None = None
    with ExitStack() as stack:
        moving = _Moving(key, source, OpenFiles(stack), room)
        for target in targets:
            region, block = target
            runs = as_it_is and region.dtype == dtype and not block.is_mean
            if block.is_mean:
                mean = moving.mean() if mean is None else mean
                moving.put_rows(mean, target)
            elif runs and (long := _long_runs(parts, target)):
                for run in long:
                    moving.copy(run)
            else:
                moving.put_together(target)
        if not moving.is_sound:
            unsound.add(key)


class _Run(NamedTuple):
    """Bytes that lie together in the source as well as in the target."""

    source: Path
    source_start: int
    target: Path
    target_start: int
    num_bytes: int


class _Moving:
    """A tensor on its way.

    Attributes:
        is_sound: whether all numbers that were moved so far are finite.

    Args:
        key: of the tensor.
        source: has it.
        files: to open files in.
        room: for what is mapped.
    """

    def __init__(self, key: str, source: TensorSource, files: OpenFiles, room: _Room) -> None:
        self.is_sound = True
        self._key, self._files, self._room = key, files, room
        self._shape, self._dtype = source.shapes[key], source.dtype(key)
        self._parts, self._source = source.parts(key), source

    def copy(self, run: _Run) -> None:
        """Copy bytes."""
        source = self._files.descriptor(run.source, os.O_RDONLY)
        target = self._files.descriptor(run.target, os.O_RDWR)
        # Not copy_file_range: blocks seldom lie alike in both, so that it takes twice the time.
        buffer, done = np.empty(min(_BLOCK, run.num_bytes), "u1"), 0
        while done < run.num_bytes:
            block = buffer[: run.num_bytes - done]
            read = os.preadv(source, [block.data], run.source_start + done)
            read -= read % self._dtype.itemsize
            if not read:
                raise UserError(f"{run.source}: got shorter meanwhile; fetch or write it again")
            self._look(block[:read], self._dtype)
            chunks.write(target, run.target_start + done, block[:read].data)
            done += read

    def put_together(self, target: Part) -> None:
        """Fill a block, some rows at a time."""
        _, block = target
        order, width = chunks.order_of(block), self._dtype.itemsize
        across = any(chunks.turns(own) for _, own in (target, *self._parts))
        row_bytes = math.prod(block.size) // max(1, block.size[order[0]]) * width if order else 0
        if not across:  # Of a part whose rows are longer, all between them is mapped, too.
            steps = [own.steps[0] * each.dtype.itemsize for each, own in self._parts if own.size]
            row_bytes = max([row_bytes, *steps])
        with self._room.take(math.prod(block.size) if across else 0):
            tensor = self._boxes(across=across)
            for slab in chunks.slabs(block.place, order, row_bytes):
                self._put(tensor.read(slab, order), target, slab)

    def put_rows(self, row: Array, target: Part) -> None:
        """Fill a block with rows that are alike, each a part of the mean of all rows."""
        _, block = target
        own = row[block.place[1:]]
        for slab in chunks.slabs(block.place, chunks.order_of(block), own.nbytes):
            made = own.reshape(1, *own.shape).repeat(chunks.size(slab)[0], axis=0)
            self._put(made.view(f"V{FLOAT32.itemsize}"), target, slab, FLOAT32)

    def mean(self) -> Array:
        """The mean of all rows in fp32.

        Rows are added up one after the other in fp64, and the sum divided by their number is
        rounded once: the same on every machine, whatever the layout of the files.
        """
        across = any(chunks.turns(own) for _, own in self._parts)
        total = np.zeros(self._shape[1:], np.float64)
        place = (*(slice(0, size) for size in self._shape),)
        row_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize
        order = (*range(len(place)),)
        with (
            np.errstate(all="ignore"),
            self._room.take(math.prod(self._shape) if across else 0),
        ):
            tensor = self._boxes(across=across)
            for slab in chunks.slabs(place, order, row_bytes):
                for row in cast.values(tensor.read(slab, order), self._dtype):
                    total += row
            return (total / self._shape[0]).astype(np.float32)

    def _boxes(self, *, across: bool) -> ChunkReader:
        return ChunkReader.of(self._source, self._key, self._files, across=across)

    def _put(
        self, made: Array, target: Part, box: tuple[slice, ...], dtype: Dtype | None = None
    ) -> None:
        """Write elements in the target's number format.

        Raises:
            UserError: that has no such numbers.
        """
        region, own = target[0], dtype or self._dtype
        content = cast.converted(made, own, region.dtype)
        if not self._look(content, region.dtype) and region.dtype != own:
            _check_range(self._key, made, own, content, region.dtype)
        self._files.write(target, box, content)

    def _look(self, content: Array, dtype: Dtype) -> bool:
        """Whether all numbers are finite, which is kept in mind."""
        finite = cast.all_finite(content, dtype)
        self.is_sound = self.is_sound and finite
        return finite


def _check_range(key: str, made: Array, own: Dtype, content: Array, dtype: Dtype) -> None:
    """See that a number format has all finite numbers of another one.

    Raises:
        UserError: it has not.
    """
    before, after = cast.values(made, own), cast.values(content, dtype)
    if (np.isfinite(before) & ~np.isfinite(after)).any():
        wider = "bf16 or fp32" if dtype.name == "float16" else "fp32"
        raise UserError(f"{key}: has numbers beyond those of {dtype.short}; take --dtype {wider}")


def _long_runs(parts: Iterable[Part], target: Part) -> list[_Run]:
    """What a target is made of, if that are long runs of bytes; else nothing."""
    found: list[_Run] = []
    for part in parts:
        box = chunks.common_box(part[1].place, target[1].place)
        if box is None:
            continue
        width, outer = target[0].dtype.itemsize, [*range(len(box))]
        steps = [[step * width for step in each.steps] for _, each in (part, target)]
        run, shape = width, chunks.size(box)
        while outer and (
            shape[outer[-1]] == 1 or steps[0][outer[-1]] == steps[1][outer[-1]] == run
        ):
            run *= shape[outer.pop()]
        if outer and run < _LONG:
            return []
        places = [chunks.first_byte(each, box) for each in (part, target)]
        for at in product(*(range(shape[dim]) for dim in outer)):
            first, second = (
                place + sum(n * own[dim] for n, dim in zip(at, outer, strict=True))
                for place, own in zip(places, steps, strict=True)
            )
            found.append(_Run(part[0].file, first, target[0].file, second, run))
    return found
