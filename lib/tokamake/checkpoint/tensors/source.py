"""Whole tensors of a checkpoint, assembled on request from extents of files."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tokamake.checkpoint.tensors import cast, dtypes
from tokamake.checkpoint.tensors.cast import Array
from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype
from tokamake.checkpoint.tensors.extents import (
    Chunk,
    Extent,
    FileChunk,
    Slices,
    overlap,
    whole_slices,
)
from tokamake.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class ComputedTensor(Protocol):
    """A tensor that is computed from files as it is read."""

    @property
    def dtype(self) -> Dtype: ...

    def values(self, slices: Slices) -> Array:
        """Slices of the tensor, as raw bytes of its dtype."""


class TensorSource:
    """Whole tensors of a checkpoint by key; each is read when it is asked for.

    Attributes:
        extents: extents that hold the tensors.
        shapes: of the whole tensors, by key.
        in_memory: tensors in memory, by key; a number is a tensor in fp32.
        computed: tensors that are computed, by key; their shapes are among `shapes`.
    """

    def __init__(
        self,
        extents: Iterable[Extent],
        shapes: Mapping[str, Iterable[int]],
        *,
        in_memory: "Mapping[str, float | Tensor] | None" = None,
        computed: Mapping[str, ComputedTensor] = MappingProxyType({}),
    ) -> None:
        self.extents = [*extents]
        self.shapes = {key: tuple(shape) for key, shape in shapes.items()}
        self.in_memory, self.computed = {**(in_memory or {})}, {**computed}
        sizes: dict[Path, int] = {}
        for extent in self.extents:
            if extent.file not in sizes:
                sizes[extent.file] = extent.file.stat().st_size
            extent.check(sizes[extent.file])
        self.extents = [extent.as_it_lies() for extent in self.extents]
        self._file_chunks: dict[str, list[FileChunk]] = defaultdict(list)
        for extent in self.extents:
            for chunk in () if extent.is_replica else extent.chunks:
                if not chunk.is_mean:
                    self._file_chunks[chunk.key].append((extent, chunk))
        for key, shape in self.shapes.items():
            if key not in self.computed:
                self._check_complete(key, shape)
        for key, value in self.in_memory.items():
            self.shapes[key] = () if isinstance(value, float) else tuple(value.shape)

    def _check_complete(self, key: str, shape: tuple[int, ...]) -> None:
        file_chunks = self._file_chunks[key]
        if pair := overlap([chunk.slices for _, chunk in file_chunks]):
            first, second = (file_chunks[number][0].file for number in pair)
            raise UserError(
                f"{second}: damaged: its part of tensor {key} overlaps that in {first}; fetch or "
                "write the checkpoint again"
            )
        # Without overlaps, the chunks cover the tensor if their sizes add up to it.
        num_elements = sum(math.prod(chunk.size) for _, chunk in file_chunks)
        if num_elements != math.prod(shape):
            folder = next((extent.file.parent for extent in self.extents), "checkpoint")
            raise UserError(
                f"{folder}: has {num_elements:,} of {math.prod(shape):,} elements of tensor {key}; "
                "check that all files of the checkpoint are there"
            )

    @property
    def weights_summary(self) -> str:
        """Number of parameters of the model, and of tensors that hold them."""
        sizes = [math.prod(shape) for key, shape in self.shapes.items() if key.startswith("model.")]
        return f"{sum(sizes):,} parameters in {len(sizes)} tensors"

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __contains__(self, key: object) -> bool:
        return key in self.shapes

    def dtype(self, key: str) -> Dtype:
        """Dtype of a tensor in the files; if its chunks differ, the widest."""
        if key in self.computed:
            return self.computed[key].dtype
        if key not in self.in_memory:
            return dtypes.widest(extent.dtype for extent, _ in self._file_chunks[key])
        value = self.in_memory[key]
        return FLOAT32 if isinstance(value, float) else dtypes.of(value.dtype)

    def file_chunks(self, key: str) -> list[FileChunk]:
        """Return the chunks of a tensor in files; none if it is in memory."""
        return [] if key in self.in_memory else self._file_chunks[key]

    def is_in_files(self, key: str) -> bool:
        """Whether a tensor is read from files, and not by `values`."""
        return key not in self.in_memory and key not in self.computed

    def values(self, key: str, slices: Slices) -> Array:
        """Read slices of a tensor that is not in files, as raw bytes of its dtype."""
        if key in self.computed:
            return self.computed[key].values(slices)
        value = self.in_memory[key]
        if isinstance(value, float):
            return np.asarray(value, "<f4").view("V4")
        return raw_bytes(value.contiguous(), self.dtype(key))[slices]

    def first_rows(self, keys: Iterable[str], count: int) -> "TensorSource":
        """Return the same source with only the first `count` rows of some tensors."""
        cut_keys = {*keys}
        shapes = {
            key: (count, *shape[1:]) if key in cut_keys else shape
            for key, shape in self.shapes.items()
            if key not in self.in_memory
        }
        extents = (
            replace(extent, chunks=_first_rows(extent.chunks, cut_keys, count=count))
            for extent in self.extents
        )
        return TensorSource(extents, shapes, in_memory=self.in_memory, computed=self.computed)

    def number(self, key: str) -> float:
        """Read a tensor without dimensions; from a file, without torch."""
        if key in self.in_memory:
            return float(self.in_memory[key])
        ((extent, chunk),) = self._file_chunks[key]
        width = extent.dtype.itemsize
        with extent.file.open("rb") as stream:
            stream.seek(extent.offset + chunk.start * width)
            raw = np.frombuffer(stream.read(width), f"V{width}")
        if extent.dtype.name.startswith(("int", "uint")):
            return float(raw.view(extent.dtype.name)[0])
        if extent.dtype.name not in cast.FLOATS:
            raise UserError(
                f"{extent.file}: tensor {extent.name} is {extent.dtype}, which is not supported "
                "for a number; save it in fp32"
            )
        return float(cast.values(raw, extent.dtype)[0])

    def read(self, key: str) -> "Tensor":
        """Read a whole tensor; one that lies in a single extent is memory-mapped."""
        import torch

        if key in self.in_memory:
            return torch.as_tensor(self.in_memory[key])
        if key in self.computed:
            raw, dtype = self.values(key, whole_slices(self.shapes[key])), self.dtype(key)
            return torch.from_numpy(raw.view("u1")).view(dtype.torch)
        file_chunks, shape = self._file_chunks[key], self.shapes[key]
        if len(file_chunks) == 1:
            extent, chunk = file_chunks[0]
            return chunk.view(extent.map())
        whole = torch.empty(shape, dtype=self.dtype(key).torch)
        mapped: dict[Extent, Tensor] = {}
        for extent, chunk in file_chunks:
            if extent not in mapped:
                mapped = {extent: extent.map()}
            whole[chunk.slices] = chunk.view(mapped[extent])
        return whole


def raw_bytes(tensor: "Tensor", dtype: Dtype) -> Array:
    """View a contiguous tensor of torch as raw bytes, without copying."""
    import torch

    flat: Array = tensor.reshape(-1).view(torch.uint8).numpy().view(f"V{dtype.itemsize}")
    return flat.reshape(tensor.shape)


def _first_rows(chunks: Iterable[Chunk], keys: set[str], *, count: int) -> tuple[Chunk, ...]:
    """Cut chunks of some tensors down to the first rows."""
    kept = []
    for chunk in chunks:
        if chunk.key in keys and not chunk.is_mean:
            rows, *columns = chunk.slices
            if rows.start >= count:
                continue
            chunk = chunk._replace(slices=(slice(rows.start, min(rows.stop, count)), *columns))
        kept.append(chunk)
    return (*kept,)
