"""Archives of torch's distributed checkpoint (DCP): locate the tensors in them, lay them out.

Its files are concatenated archives of torch.save; each archive holds one chunk of a tensor.
`.metadata` says which. Where the data begins in an archive is parsed once for all archives that
begin with the same bytes.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor
from tokamake.checkpoint.torch_files import dcp_metadata, pickle_reader, torch_archive
from tokamake.checkpoint.torch_files.dcp_metadata import StorageLocation, StoredChunk, WholeTensor
from tokamake.errors import UserError, reason_of

_REMEDY = "name another checkpoint"
_ALIGNMENT = 64
"""Each archive begins at a multiple of it, in bytes, as its data does within the archive."""


class _ArchivedChunk(NamedTuple):
    """A chunk of a tensor, and the archive that holds it."""

    key: str
    chunk: StoredChunk
    location: StorageLocation


class _ArchiveLayout(NamedTuple):
    """Position of a tensor in an archive of torch.save."""

    head: bytes
    """All bytes before the data."""
    num_elements: int
    dtype: Dtype
    start: int
    """First element of the tensor in the data."""
    stride: tuple[int, ...]


def locate(folder: Path, tensors: Mapping[str, WholeTensor]) -> Iterator[Extent]:
    """Yield an extent with one chunk for each archive of tensors in a folder."""
    chunks: dict[str, list[_ArchivedChunk]] = defaultdict(list)
    for key, tensor in tensors.items():
        for chunk in tensor.chunks:
            if chunk.location:
                chunks[chunk.location.file].append(_ArchivedChunk(key, chunk, chunk.location))
    layouts: dict[Any, _ArchiveLayout] = {}
    for name, chunks_of_file in sorted(chunks.items()):
        chunks_of_file.sort(key=lambda chunk: chunk.location.offset)
        yield from _read_file(folder / name, chunks_of_file, layouts=layouts)


def _read_file(
    file: Path, chunks: Iterable[_ArchivedChunk], *, layouts: dict[Any, _ArchiveLayout]
) -> Iterator[Extent]:
    """Locate chunks in a file; layouts of archives are read from `layouts` and added to it."""
    with file.open("rb") as stream:
        for chunk in chunks:
            _, start, length = chunk.location
            layout = layouts.get(cache_key := (length, chunk.chunk.size))
            stream.seek(start)
            # The head holds the archive's format, and the tensor's shape, strides and dtype. So an
            # archive with the same head has the same layout, and parsing it again is needless.
            if layout is None or stream.read(len(layout.head)) != layout.head:
                layout = layouts[cache_key] = _parse_archive(file, stream, chunk=chunk)
            yield _extent(file, chunk, layout=layout)


def _parse_archive(file: Path, stream: IO[bytes], *, chunk: _ArchivedChunk) -> _ArchiveLayout:
    key, (_, size, _), (_, start, length) = chunk
    tensor = _parse(file, stream, key=key, location=chunk.location)
    if not isinstance(tensor, pickle_reader.PickledTensor) or tensor.shape != size:
        raise UserError(f"{file}: damaged at {key}, not of the size {size}; {_REMEDY}")
    if tensor.end > length:
        raise UserError(f"{file}: damaged at {key}, which is truncated; {_REMEDY}")
    begin, itemsize = tensor.begin, tensor.dtype.itemsize
    first, num_elements = ((at - begin) // itemsize for at in (tensor.offset, tensor.end))
    stream.seek(start)
    return _ArchiveLayout(stream.read(begin), num_elements, tensor.dtype, first, tensor.stride)


def _parse(file: Path, stream: IO[bytes], *, key: str, location: StorageLocation) -> Any:
    """Parse an archive; offsets count from its first byte."""
    _, start, length = location
    try:
        return pickle_reader.parse(pickle_reader.View(stream, start, length=length))
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{file}: damaged at {key} ({reason_of(error)}); {_REMEDY}") from None


def _extent(file: Path, archived: _ArchivedChunk, *, layout: _ArchiveLayout) -> Extent:
    pairs = zip(archived.chunk.offset, archived.chunk.size, strict=True)
    slices = tuple(slice(first, first + size) for first, size in pairs)
    chunk = Chunk(archived.key, slices, layout.start, layout.stride)
    begin = archived.location.offset + len(layout.head)
    return Extent(file, archived.key, begin, (layout.num_elements,), layout.dtype, (chunk,))


def read_object(folder: Path, key: str, *, location: StorageLocation) -> Any:
    """Return an object of an archive; offsets of its `PickledTensor` count from the first byte."""
    file = folder / location.file
    try:
        with file.open("rb") as stream:
            return _parse(file, stream, key=key, location=location)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {_REMEDY}") from None


def write_object(folder: Path, state: Any) -> StorageLocation:
    """Write an object without tensors into a file of its own, and return where it lies."""
    file = folder / f"__1_0{dcp_metadata.SUFFIX}"
    torch_archive.lay_out(file, state)
    return StorageLocation(file.name, 0, file.stat().st_size)


class PlannedArchive(NamedTuple):
    """A chunk of a tensor to be written."""

    key: str
    """Key of the tensor."""
    offset: tuple[int, ...]
    """Where the chunk begins in the tensor, by dimension."""
    tensor: PlannedTensor
    """The chunk."""


class _ArchiveFrame(NamedTuple):
    """Bytes that torch.save writes around the data of a tensor."""

    head: bytes
    data_bytes: int
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.data_bytes + len(self.tail)


class PlacedArchives(NamedTuple):
    """Places of archives in files."""

    tensors: dict[str, WholeTensor]
    """The tensors by key, for `.metadata`."""
    extents: list[Extent]
    """Where the data of the archives goes."""


def lay_out(
    folder: Path, archives: Iterable[PlannedArchive], *, max_shard_bytes: int
) -> PlacedArchives:
    """Write files with holes in place of data, up to `max_shard_bytes` or one larger archive."""
    frame_of = functools.cache(functools.partial(_frame, folder))
    placed: dict[str, list[tuple[PlannedArchive, StorageLocation]]] = defaultdict(list)
    extents, file_number, end = [], 0, 0
    for archive in archives:
        frame = frame_of(archive.tensor.shape, archive.tensor.dtype)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if start and start + frame.length > max_shard_bytes:
            file_number, start = file_number + 1, 0
        end = start + frame.length
        # DCP names files by the rank that writes them, and a count.
        location = StorageLocation(f"__0_{file_number}{dcp_metadata.SUFFIX}", start, frame.length)
        placed[archive.key].append((archive, location))
        data_start = _write_frame(folder, frame, location=location)
        extents.append(archive.tensor.extent(folder / location.file, archive.key, data_start))
    return PlacedArchives({key: _whole_tensor(chunks) for key, chunks in placed.items()}, extents)


def _frame(folder: Path, shape: tuple[int, ...], dtype: Dtype) -> _ArchiveFrame:
    file = folder / "archive"
    (extent,) = torch_archive.lay_out(file, PlannedTensor(shape, dtype, ()))
    with file.open("rb") as stream:
        head = stream.read(extent.offset)
        stream.seek(extent.num_bytes, os.SEEK_CUR)
        tail = stream.read()
    file.unlink()
    return _ArchiveFrame(head, extent.num_bytes, tail)


def _write_frame(folder: Path, frame: _ArchiveFrame, *, location: StorageLocation) -> int:
    """Write an archive with a hole in place of its data, and return where the data begins."""
    with (folder / location.file).open("r+b" if location.offset else "wb") as stream:
        stream.seek(location.offset)
        stream.write(frame.head)
        data_start = stream.tell()
        stream.seek(frame.data_bytes, os.SEEK_CUR)
        stream.write(frame.tail)
    return data_start


def _whole_tensor(placed: Sequence[tuple[PlannedArchive, StorageLocation]]) -> WholeTensor:
    chunks = (*(StoredChunk(a.offset, a.tensor.shape, location) for a, location in placed),)
    ends = (tuple(map(sum, zip(chunk.offset, chunk.size, strict=True))) for chunk in chunks)
    size = tuple(map(max, zip(*ends, strict=True)))
    return WholeTensor(size, placed[0][0].tensor.dtype, chunks)
