"""Extents: runs of bytes in files, each of which holds chunks of whole tensors.

A format says where tensors lie (`Extent`) and where they are to be written (`PlannedTensor`).
`TensorSource` assembles whole tensors on request; `copy` moves them from files into other files.
"""

import math
import mmap
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype
from tokamake.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_CODES = {
    **{"float64": "<d", "float32": "<f", "float16": "<e"},
    **{"int64": "<q", "int32": "<i", "int16": "<h", "int8": "<b"},
    **{"uint64": "<Q", "uint32": "<I", "uint16": "<H", "uint8": "<B"},
}
"""How Python unpacks numbers of a format."""


class Chunk(NamedTuple):
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
        steps = zip(size, self.steps, strict=True)
        return self.start + 1 + sum((count - 1) * step for count, step in steps)

    @property
    def steps(self) -> tuple[int, ...]:
        """Elements from one to the next in each dimension."""
        return _dense(self.size) if self.stride is None else self.stride

    def view(self, flat: "Tensor") -> "Tensor":
        """The box in a stored tensor, which is flat."""
        return flat.as_strided(self.size, self.steps, self.start)


def overlap(places: Sequence[tuple[slice, ...]]) -> tuple[int, int] | None:
    """Numbers of two boxes that have elements in common, if there are such.

    Args:
        places: of the boxes, in the same tensor.
    """
    if len(places) < 2:
        return None
    filled = [n for n, place in enumerate(places) if all(at.start < at.stop for at in place)]
    near: list[int] = []
    # By first rows, so that boxes are compared only with those that have rows in common.
    for number in sorted(filled, key=lambda n: [at.start for at in places[n][:1]]):
        place = places[number]
        near = [n for n in near if not place or places[n][0].stop > place[0].start]
        for other in near:
            pairs = zip(place, places[other], strict=True)
            if all(a.start < b.stop and b.start < a.stop for a, b in pairs):
                return other, number
        near.append(number)
    return None


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor that lies row after row, without gaps."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True)
class Extent:
    """A tensor in a file."""

    file: Path
    name: str
    """Its name there, for messages."""
    offset: int
    """Its first byte."""
    shape: tuple[int, ...]
    dtype: Dtype
    blocks: tuple[Chunk, ...] = field(default=(), hash=False)  # slices have none in Python 3.11
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

    def map(self, *, writable: bool = False) -> "Tensor":
        """Its elements row after row, flat; what is written goes to the file if `writable`."""
        import torch

        assert self.stride is None, "as it lies, a region has no strides"
        if not self.numel:
            return torch.empty(0, dtype=self.dtype.torch)
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
        return torch.frombuffer(mapped, dtype=self.dtype.torch, count=self.numel, offset=before)

    def as_it_lies(self) -> "Extent":
        """The same, its blocks by where elements lie in the file, not by rows of the tensor.

        Raises:
            UserError: a block's elements are not the same number of bytes apart.
        """
        if self.stride is None:
            return self
        if not self.numel:
            return replace(self, stride=None)
        blocks = (*(self._as_it_lies(block, self.stride) for block in self.blocks),)
        span = self.num_bytes // self.dtype.itemsize
        return replace(self, shape=(span,), stride=None, blocks=blocks)

    def _as_it_lies(self, block: Chunk, stride: tuple[int, ...]) -> Chunk:
        rows, left, last, start, steps = _dense(self.shape), block.start, [], 0, []
        for row, step in zip(rows, stride, strict=True):
            index, left = divmod(left, row)
            last.append(index)
            start += index * step
        for count, wanted in zip(block.size, block.steps, strict=True):
            fitting = (n for n, size in enumerate(self.shape) if size > 1 and not wanted % rows[n])
            dim = next(fitting, None)
            index = 0 if dim is None else wanted // rows[dim]
            steps.append(0 if dim is None else index * stride[dim])
            if dim is not None:
                last[dim] += (count - 1) * index
        if any(index >= size for index, size in zip(last, self.shape, strict=True)):
            raise UserError(
                f"{self.file}: tensor {self.name} lies in an order that is not read; save it again "
                "after contiguous()"
            )
        return block._replace(start=start, stride=(*steps,))


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that a file shall hold."""

    shape: tuple[int, ...]
    dtype: Dtype
    blocks: tuple[Chunk, ...]
    is_copy: bool = False
    """See `Extent`."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    @property
    def stride(self) -> tuple[int, ...]:
        """Elements from one to the next in each dimension: it is to lie row after row."""
        return _dense(self.shape)

    def region(self, file: Path, name: str, offset: int) -> Extent:
        """The same where it lies in a file; see there."""
        return Extent(file, name, offset, self.shape, self.dtype, self.blocks, self.is_copy)


class TensorSource:
    """Whole tensors of a checkpoint by their keys; each is read when it is asked for.

    Attributes:
        regions: where they lie.
        given: tensors that lie in no file as such, by key.

    Args:
        regions: where they lie.
        shapes: of the whole tensors, by key.
        given: tensors that lie in no file as such, by key; a number is one in fp32.

    Raises:
        UserError: a file is too short, or a tensor is not there whole.
    """

    def __init__(
        self,
        regions: Iterable[Extent],
        shapes: Mapping[str, Iterable[int]],
        given: "Mapping[str, float | Tensor] | None" = None,
    ) -> None:
        self.regions = [*regions]
        self.shapes = {key: tuple(shape) for key, shape in shapes.items()}
        self.given = {**(given or {})}
        self._parts: dict[str, list[tuple[Extent, Chunk]]] = defaultdict(list)
        sizes: dict[Path, int] = {}
        for region in self.regions:
            if region.file not in sizes:
                sizes[region.file] = region.file.stat().st_size
            region.check(sizes[region.file])
        self.regions = [region.as_it_lies() for region in self.regions]
        for region in self.regions:
            for block in () if region.is_copy else region.blocks:
                if not block.is_mean:
                    self._parts[block.key].append((region, block))
        for key, shape in self.shapes.items():
            if twice := overlap([block.place for _, block in self._parts[key]]):
                one, other = (self._parts[key][number][0].file for number in twice)
                raise UserError(
                    f"{other}: damaged: its part of tensor {key} overlaps that in {one}; fetch or "
                    "write the checkpoint again"
                )
            found = sum(math.prod(block.size) for _, block in self._parts[key])
            if found != math.prod(shape):
                where = next((region.file.parent for region in self.regions), "checkpoint")
                raise UserError(
                    f"{where}: has {found:,} of {math.prod(shape):,} elements of tensor {key}; "
                    "are all files of the checkpoint there?"
                )
        for key, value in self.given.items():
            self.shapes[key] = () if isinstance(value, float) else tuple(value.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __contains__(self, key: object) -> bool:
        return key in self.shapes

    def dtype(self, key: str) -> Dtype:
        """Number format of a tensor in the files; of several, one that holds all their numbers."""
        if key not in self.given:
            return dtypes.widest(region.dtype for region, _ in self._parts[key])
        value = self.given[key]
        return FLOAT32 if isinstance(value, float) else dtypes.of(value.dtype)

    def parts(self, key: str) -> list[tuple[Extent, Chunk]]:
        """Where the parts of a tensor lie; nowhere, if it is in no file as such."""
        return [] if key in self.given else self._parts[key]

    def first_rows(self, keys: Iterable[str], count: int) -> "TensorSource":
        """The same, but of some tensors the first rows alone.

        Args:
            keys: of those.
            count: of their rows that stay.
        """
        wanted = {*keys}
        shapes = {
            key: (count, *shape[1:]) if key in wanted else shape
            for key, shape in self.shapes.items()
            if key not in self.given
        }
        regions = (
            replace(each, blocks=_first(each.blocks, wanted, count)) for each in self.regions
        )
        return TensorSource(regions, shapes, self.given)

    def number(self, key: str) -> float:
        """A tensor without dimensions, read without torch where it lies in a file.

        Raises:
            UserError: it is in a format that no such numbers are in.
        """
        if key in self.given:
            return float(self.given[key])
        ((region, block),) = self._parts[key]
        name, width = region.dtype.name, region.dtype.itemsize
        with region.file.open("rb") as stream:
            stream.seek(region.offset + block.start * width)
            raw = stream.read(width)
        if name == "bfloat16":  # the upper half of fp32
            name, raw = "float32", bytes(2) + raw
        if name not in _CODES:
            raise UserError(
                f"{region.file}: tensor {region.name} is {region.dtype}, in which no number is "
                "expected; save it in fp32"
            )
        (found,) = struct.unpack(_CODES[name], raw)
        return float(found)

    def read(self, key: str) -> "Tensor":
        """A whole tensor; backed by its file where it lies there in one piece."""
        import torch

        if key in self.given:
            return torch.as_tensor(self.given[key])
        parts, shape = self._parts[key], self.shapes[key]
        if len(parts) == 1:
            region, block = parts[0]
            return block.view(region.map())
        whole = torch.empty(shape, dtype=self.dtype(key).torch)
        mapped: dict[Extent, Tensor] = {}
        for region, block in parts:
            if region not in mapped:
                mapped = {region: region.map()}
            whole[block.place] = block.view(mapped[region])
        return whole


def _first(blocks: Iterable[Chunk], keys: set[str], count: int) -> tuple[Chunk, ...]:
    """Blocks without what is in rows after the first ones of some tensors."""
    found = []
    for block in blocks:
        if block.key in keys and not block.is_mean:
            rows, *rest = block.place
            if rows.start >= count:
                continue
            block = block._replace(place=(slice(rows.start, min(rows.stop, count)), *rest))
        found.append(block)
    return (*found,)
