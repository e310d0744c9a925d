"""Brings tensors from the files of a checkpoint into files that are laid out already.

Bytes that stay together are read and written, block by block; those that come apart, come together
or are transposed are mapped and put in order first. torch is there only where numbers change.
"""

import math
import mmap
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, NamedTuple

from tokamake.checkpoint.regions import Block, Region, Source
from tokamake.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Box = tuple[slice, ...]
Part = tuple[Region, Block]

_WORKERS = min(4, os.cpu_count() or 1)
"""Tensors that are moved at once, if there is room for them."""
_LONG = 2**14
"""Bytes that stay together from which on they are copied by themselves."""
_BLOCK = 2**20
"""Bytes that are copied at once."""
_SLAB = 2**22
"""Bytes of rows that are put together at once."""
_TILE = 64
"""Rows that are transposed at once, so that they stay in the processor's cache."""


def fill(regions: Iterable[Region], source: Source, *, keys: Iterable[str]) -> Iterator[str]:
    """Bring whole tensors into files, and name each that is there.

    Args:
        regions: of the files, which are there in full length; what no block covers stays as it is.
        source: what to write.
        keys: of the tensors that are wanted.
    """
    targets: dict[str, list[Part]] = defaultdict(list)
    for region in regions:
        for block in region.blocks:
            targets[block.key].append((region, block))
    wanted = [*keys]
    room = _Room(max((math.prod(source.shapes[key]) for key in wanted), default=0))

    def move(key: str) -> str:
        _move(key, source, targets[key], room)
        return key

    with ThreadPoolExecutor(_WORKERS) as pool:
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


def _move(key: str, source: Source, targets: Iterable[Part], room: _Room) -> None:
    """Bring a tensor to where it is wanted."""
    parts, rest = source.parts(key), []
    dtype = source.dtype(key)
    as_it_is = bool(parts) and all(
        region.stride is None and region.dtype == dtype for region, _ in parts
    )
    with ExitStack() as stack:
        files = _Files(stack)
        for region, block in targets:
            if not as_it_is or region.dtype != dtype or block.is_mean:
                rest.append((region, block))
            elif runs := _long_runs(parts, (region, block)):
                for run in runs:
                    files.copy(run)
            else:
                with room.take(math.prod(block.size) if _turns(parts, block) else 0):
                    _put_together(files, parts, (region, block))
    if rest:
        with room.take(math.prod(source.shapes[key])):
            whole = source.read(key)
            for region, block in rest:
                _write_numbers(key, whole, region, block)


class _Run(NamedTuple):
    """Bytes that lie together in the source as well as in the target."""

    source: Path
    source_start: int
    target: Path
    target_start: int
    num_bytes: int


class _Files:
    """Files that are open, each once.

    Args:
        stack: what closes them.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._open = stack, dict[tuple[Path, int], int]()

    def descriptor(self, file: Path, flags: int) -> int:
        """Of a file."""
        if (file, flags) not in self._open:
            self._open[file, flags] = found = os.open(file, flags)
            self._stack.callback(os.close, found)
        return self._open[file, flags]

    def copy(self, run: _Run) -> None:
        """Copy bytes."""
        source = self.descriptor(run.source, os.O_RDONLY)
        target = self.descriptor(run.target, os.O_RDWR)
        # Not copy_file_range: blocks seldom lie alike in both, so that it takes twice the time.
        buffer, done = memoryview(bytearray(min(_BLOCK, run.num_bytes))), 0
        while done < run.num_bytes:
            block = buffer[: run.num_bytes - done]
            read = os.preadv(source, [block], run.source_start + done)
            if not read:
                raise UserError(f"{run.source}: got shorter meanwhile; fetch or write it again")
            self.write(target, run.target_start + done, block[:read])
            done += read

    @staticmethod
    def write(target: int, start: int, content: memoryview) -> None:
        """Write bytes to a descriptor."""
        while content:
            written = os.pwrite(target, content, start)
            content, start = content[written:], start + written

    def view(self, part: Part, box: Box, *, writable: bool = False) -> "np.ndarray[Any, Any]":
        """Elements of a box as they lie in a file, which is mapped; what they mean, none asks."""
        import numpy as np

        region, block = part
        width, start = region.dtype.itemsize, _first_byte(part, box)
        size, steps = _size(box), [step * region.dtype.itemsize for step in block.steps]
        span = width + sum((n - 1) * step for n, step in zip(size, steps, strict=True))
        before = start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self.descriptor(region.file, os.O_RDWR if writable else os.O_RDONLY),
            before + span,
            access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ,
            offset=start - before,
        )
        return np.ndarray(size, f"V{width}", mapped, before, steps)


def _long_runs(parts: Iterable[Part], target: Part) -> list[_Run]:
    """What a target is made of, if that are long runs of bytes; else nothing."""
    found: list[_Run] = []
    for part in parts:
        box = _common(part[1].place, target[1].place)
        if box is None:
            continue
        width, outer = target[0].dtype.itemsize, [*range(len(box))]
        steps = [[step * width for step in each.steps] for _, each in (part, target)]
        run, size = width, _size(box)
        while outer and (size[outer[-1]] == 1 or steps[0][outer[-1]] == steps[1][outer[-1]] == run):
            run *= size[outer.pop()]
        if outer and run < _LONG:
            return []
        places = [_first_byte(each, box) for each in (part, target)]
        for at in product(*(range(size[dim]) for dim in outer)):
            first, second = (
                place + sum(n * own[dim] for n, dim in zip(at, outer, strict=True))
                for place, own in zip(places, steps, strict=True)
            )
            found.append(_Run(part[0].file, first, target[0].file, second, run))
    return found


def _turns(parts: Iterable[Part], block: Block) -> bool:
    """Whether rows lie as columns in a part or in what it shall become."""
    every = (block, *(own for _, own in parts))
    return any(each.stride is not None and each.stride[-1:] != (1,) for each in every)


def _put_together(files: _Files, parts: Iterable[Part], target: Part) -> None:
    """Fill a block, some rows at a time; all at once if they lie as columns somewhere."""
    import numpy as np

    region, block = target
    rows, *rest = block.place
    row_bytes = math.prod(_size(rest)) * region.dtype.itemsize
    each = rows.stop - rows.start if _turns(parts, block) else max(1, _SLAB // row_bytes)
    for first in range(rows.start, rows.stop, each):
        slab = (slice(first, min(first + each, rows.stop)), *rest)
        made = np.empty(_size(slab), f"V{region.dtype.itemsize}")
        for part in parts:
            if (box := _common(part[1].place, slab)) is not None:
                within = tuple(
                    slice(own.start - at.start, own.stop - at.start)
                    for own, at in zip(box, slab, strict=True)
                )
                _copy(made[within], files.view(part, box))
        if block.stride is None:
            descriptor = files.descriptor(region.file, os.O_RDWR)
            files.write(descriptor, _first_byte(target, slab), made.reshape(-1).view("u1").data)
        else:
            _copy(files.view(target, slab, writable=True), made)


def _copy(target: "np.ndarray[Any, Any]", source: "np.ndarray[Any, Any]") -> None:
    for first in range(0, len(source), _TILE):
        target[first : first + _TILE] = source[first : first + _TILE]


def _first_byte(part: Part, box: Box) -> int:
    """Where a box, which is in a block, begins in a file."""
    region, block = part
    pairs = zip(box, block.place, block.steps, strict=True)
    element = block.start + sum((own.start - at.start) * step for own, at, step in pairs)
    return region.offset + element * region.dtype.itemsize


def _size(box: Iterable[slice]) -> tuple[int, ...]:
    return tuple(at.stop - at.start for at in box)


def _common(one: Box, other: Box) -> Box | None:
    """What is in both boxes, if anything is."""
    pairs = zip(one, other, strict=True)
    found = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return None if any(at.start >= at.stop for at in found) else found


def _write_numbers(key: str, whole: "Tensor", region: Region, block: Block) -> None:
    """Fill a block with numbers of the target's format."""
    import torch

    dtype = region.dtype.torch
    box = _mean(whole, block) if block.is_mean else whole[block.place]
    if dtype == torch.float16:
        _check_range(key, box)
    if block.stride is not None:
        block.view(region.map(writable=True)).copy_(box)
        return
    elements: Any = box.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
    with ExitStack() as stack:
        files, start = _Files(stack), region.offset + block.start * region.dtype.itemsize
        files.write(files.descriptor(region.file, os.O_RDWR), start, memoryview(elements))


def _check_range(key: str, box: "Tensor") -> None:
    """See that fp16 has such numbers."""
    import torch

    wide = box.dtype != torch.float16
    if wide and bool((box.isfinite() & ~box.half().isfinite()).any()):
        raise UserError(f"{key}: has numbers beyond those of fp16; take --dtype bf16 or fp32")


def _mean(whole: "Tensor", block: Block) -> "Tensor":
    return whole.float().mean(0)[block.place[1:]].expand(block.size)
