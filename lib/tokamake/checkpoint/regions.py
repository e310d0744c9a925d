"""Tensors where they lie in files: runs of bytes, each made of boxes of whole tensors.

Formats say what lies where (`Region`). `Source` assembles whole tensors, each when it is asked for;
`fill` brings them into files that are laid out already. Neither holds more than a few tensors, for
files are mapped piece by piece.
"""

import math
import mmap
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokamake.errors import UserError

_WORKERS = 4
"""Tensors that are moved at once, if they are small."""


class Block(NamedTuple):
    """A box of a whole tensor, as it lies in a stored one."""

    key: str
    """Of the whole tensor."""
    place: tuple[slice, ...]
    """The box."""
    start: int = 0
    """Element of the stored tensor with which it begins."""
    stride: tuple[int, ...] | None = None
    """Elements from one to the next in each dimension; None: row after row, without gaps."""
    is_mean: bool = False
    """Whether each row of the box is the mean of all rows of the whole, as in padding."""

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(at.stop - at.start for at in self.place)

    @property
    def stop(self) -> int:
        """Element of the stored tensor after its last one."""
        size = self.size
        if not math.prod(size):
            return self.start
        steps = zip(size, self._steps, strict=True)
        return self.start + 1 + sum((count - 1) * step for count, step in steps)

    @property
    def _steps(self) -> tuple[int, ...]:
        size = self.size
        dense = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
        return dense if self.stride is None else self.stride

    def view(self, flat: Tensor) -> Tensor:
        """The box in a stored tensor, which is flat."""
        return flat.as_strided(self.size, self._steps, self.start)


@dataclass(frozen=True)
class Region:
    """A tensor in a file."""

    file: Path
    name: str
    """Its name there, for messages."""
    offset: int
    """Its first byte."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...] = field(default=(), hash=False)  # slices have none in Python 3.11
    """What it is made of; elements in no block mean nothing, such as padding."""
    is_copy: bool = False
    """Whether other regions hold the same, as ranks that share a norm."""
    stride: tuple[int, ...] | None = None
    """Elements from one to the next in each dimension, where they do not lie row after row."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes from the first element to the last one's end."""
        if self.stride is None or not self.numel:
            return self.numel * self.dtype.itemsize
        steps = zip(self.shape, self.stride, strict=True)
        return (1 + sum((size - 1) * step for size, step in steps)) * self.dtype.itemsize

    def check(self, size: int) -> None:
        """See that the file, of so many bytes, holds all of it, and it all of its blocks.

        Raises:
            UserError: it does not.
        """
        if self.offset + self.num_bytes > size:
            raise UserError(
                f"{self.file}: damaged: has {size:,} bytes, tensor {self.name} would end at "
                f"{self.offset + self.num_bytes:,}; fetch or write the file again"
            )
        if any(block.stop > self.numel for block in self.blocks):
            raise UserError(
                f"{self.file}: damaged: tensor {self.name} has {self.numel:,} elements, "
                f"{max(block.stop for block in self.blocks):,} belong in it; fetch or write the "
                "file again"
            )

    def map(self, *, writable: bool = False) -> Tensor:
        """Its elements row after row, flat; what is written goes to the file if `writable`."""
        if not self.numel:
            return torch.empty(0, dtype=self.dtype)
        before = self.offset % mmap.ALLOCATIONGRANULARITY
        # A private copy where nothing is to be written: torch takes no read-only memory.
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        with self.file.open("r+b" if writable else "rb") as stream:
            mapped = mmap.mmap(
                stream.fileno(),
                before + self.num_bytes,
                access=access,
                offset=self.offset - before,
            )
        count = self.num_bytes // self.dtype.itemsize
        flat = torch.frombuffer(mapped, dtype=self.dtype, count=count, offset=before)
        if self.stride is None:
            return flat
        assert not writable, "files are laid out row after row"
        return flat.as_strided(self.shape, self.stride).reshape(-1)


class Source:
    """Whole tensors of a checkpoint by their keys; each is read when it is asked for.

    Attributes:
        regions: where they lie.

    Args:
        regions: where they lie.
        shapes: of the whole tensors, by key.
        given: tensors that lie in no file as such, by key.

    Raises:
        UserError: a file is too short, or a tensor is not there whole.
    """

    def __init__(
        self,
        regions: Iterable[Region],
        shapes: Mapping[str, Iterable[int]],
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.regions = [*regions]
        self.shapes = {key: tuple(shape) for key, shape in shapes.items()}
        self._given = {**(given or {})}
        self._parts: dict[str, list[tuple[Region, Block]]] = defaultdict(list)
        sizes: dict[Path, int] = {}
        for region in self.regions:
            if region.file not in sizes:
                sizes[region.file] = region.file.stat().st_size
            region.check(sizes[region.file])
            for block in () if region.is_copy else region.blocks:
                if not block.is_mean:
                    self._parts[block.key].append((region, block))
        for key, shape in self.shapes.items():
            found = sum(math.prod(block.size) for _, block in self._parts[key])
            if found != math.prod(shape):
                where = next((region.file.parent for region in self.regions), "checkpoint")
                raise UserError(
                    f"{where}: has {found:,} of {math.prod(shape):,} elements of tensor {key}; "
                    "are all files of the checkpoint there?"
                )
        self.shapes |= {key: tuple(tensor.shape) for key, tensor in self._given.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __contains__(self, key: object) -> bool:
        return key in self.shapes

    def dtype(self, key: str) -> torch.dtype:
        """Number format of a tensor in the files."""
        given = self._given.get(key)
        return self._parts[key][0][0].dtype if given is None else given.dtype

    def read(self, key: str) -> Tensor:
        """A whole tensor; backed by its file where it lies there in one piece."""
        if key in self._given:
            return self._given[key]
        parts, shape = self._parts[key], self.shapes[key]
        if len(parts) == 1:
            region, block = parts[0]
            return block.view(region.map())
        whole = torch.empty(shape, dtype=self.dtype(key))
        mapped: dict[Region, Tensor] = {}
        for region, block in parts:
            if region not in mapped:
                mapped = {region: region.map()}
            whole[block.place] = block.view(mapped[region])
        return whole


def fill(regions: Iterable[Region], source: Source, *, keys: Iterable[str]) -> Iterator[str]:
    """Bring whole tensors into files, and name each that is there.

    Args:
        regions: of the files, which are there in full length; what no block covers stays as it is.
        source: what to write.
        keys: of the tensors that are wanted; each of them is read once.
    """
    targets: dict[str, list[tuple[Region, Block]]] = defaultdict(list)
    for region in regions:
        for block in region.blocks:
            targets[block.key].append((region, block))

    def move(key: str) -> str:
        whole = source.read(key)
        for region, block in targets[key]:
            box = _mean(whole, block) if block.is_mean else whole[block.place]
            if region.dtype == torch.float16:
                _check_range(key, box)
            if block.stride is None:
                _write(region, block.start, box.to(region.dtype).contiguous())
            else:
                block.view(region.map(writable=True)).copy_(box)
        return key

    with ThreadPoolExecutor(_WORKERS) as pool:
        for batch in _batches([*keys], source):
            yield from pool.map(move, batch)


def _check_range(key: str, box: Tensor) -> None:
    """See that fp16 has such numbers."""
    wide = box.dtype != torch.float16
    if wide and bool((box.isfinite() & ~box.half().isfinite()).any()):
        raise UserError(f"{key}: has numbers beyond those of fp16; take --dtype bf16 or fp32")


def _mean(whole: Tensor, block: Block) -> Tensor:
    return whole.float().mean(0)[block.place[1:]].expand(block.size)


def _write(region: Region, start: int, box: Tensor) -> None:
    """Write a box row after row, which takes half the time of doing so through a map."""
    elements: Any = box.reshape(-1).view(torch.uint8).numpy()
    left = memoryview(elements)
    place = region.offset + start * region.dtype.itemsize
    descriptor = os.open(region.file, os.O_WRONLY)
    try:
        while left:
            written = os.pwrite(descriptor, left, place)
            left, place = left[written:], place + written
    finally:
        os.close(descriptor)


def _batches(keys: list[str], source: Source) -> Iterator[list[str]]:
    """Tensors in turn, as many at once as are together no larger than the largest."""
    sizes = {key: math.prod(source.shapes[key]) for key in keys}
    most = max(sizes.values(), default=0)
    batch: list[str] = []
    for key in keys:
        if batch and sum(sizes[each] for each in batch) + sizes[key] > most:
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch
