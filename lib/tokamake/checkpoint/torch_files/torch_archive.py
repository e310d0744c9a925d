"""Extents of tensors in files of torch.save: locate them, lay files out, write checksums."""

import functools
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from isal import isal_zlib

from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor
from tokamake.checkpoint.torch_files import archive_writer
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor, View, data_offset

_READ_BYTES = 2**20
"""Bytes that are read at once for a checksum."""
_CENTRAL_HEADER_BYTES = 46
"""Bytes of an entry of a zip's directory before its name, extra fields and comment."""


def extent(file: Path, name: str, tensor: Any, chunks: tuple[Chunk, ...] = ()) -> Extent:
    """Return the extent of a tensor that `pickle_reader.read` returned."""
    assert isinstance(tensor, PickledTensor)
    stride = None if tensor.is_contiguous else tensor.stride
    return Extent(file, name, tensor.offset, tensor.shape, tensor.dtype, chunks, stride=stride)


def lay_out(file: Path, state: Any) -> list[Extent]:
    """Write the argument of torch.save with `PlannedTensor` as tensors, whose data become holes."""
    offsets = archive_writer.write(file, state)
    names = (name for name, value in leaves(state) if isinstance(value, PlannedTensor))
    return [
        tensor.extent(file, name, offset)
        for name, (tensor, offset) in zip(names, offsets, strict=True)
    ]


def leaves(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings and lists, by dotted names."""
    if isinstance(state, Mapping):
        pairs = ((str(key), value) for key, value in state.items())
    elif isinstance(state, list | tuple):
        pairs = ((str(number), value) for number, value in enumerate(state))
    else:
        yield prefix.removesuffix("."), state
        return
    for key, value in pairs:
        yield from leaves(value, f"{prefix}{key}.")


class _Unsealed(NamedTuple):
    """Data in an archive without a checksum."""

    start: int
    size: int
    fields: tuple[int, int]
    """Offsets of the checksum: in the local header, and in the central directory."""


def archives(files: Iterable[Path]) -> dict[Path, list[tuple[int, int]]]:
    """Return first byte and length of the archive in each file, which is the whole file."""
    return {file: [(0, file.stat().st_size)] for file in files}


def seal(file: Path, archives: Iterable[tuple[int, int]], *, workers: int = 1) -> None:
    """Write the checksums of the data into a file that was laid out and filled.

    torch itself does not verify them; `convert`, `inspect` and other programs do.
    """
    with file.open("r+b") as stream, ThreadPoolExecutor(workers) as pool:
        entries = [
            entry for start, length in archives for entry in _unsealed(stream, start, length=length)
        ]
        compute = functools.partial(checksum, stream.fileno())
        starts, sizes = (entry.start for entry in entries), (entry.size for entry in entries)
        for entry, value in zip(entries, pool.map(compute, starts, sizes), strict=True):
            # The directory's field is last: until it is set, a later call seals the entry again.
            for field in entry.fields:
                stream.seek(field)
                stream.write(struct.pack("<I", value))


def _unsealed(stream: IO[bytes], start: int, *, length: int) -> Iterator[_Unsealed]:
    """Yield the data without checksums in an archive."""
    view = View(stream, start, length=length)
    with zipfile.ZipFile(view) as archive:
        entries, place = archive.infolist(), archive.start_dir
    for entry in entries:
        if entry.file_size and not entry.CRC:
            fields = start + entry.header_offset + 14, start + place + 16
            yield _Unsealed(start + data_offset(view, entry), entry.file_size, fields)
        lengths = len(entry.orig_filename.encode()), len(entry.extra), len(entry.comment)
        place += _CENTRAL_HEADER_BYTES + sum(lengths)


def checksum(descriptor: int, start: int, size: int) -> int:
    """Return the CRC-32 of some bytes of a file."""
    value, buffer = 0, memoryview(bytearray(min(_READ_BYTES, size)))
    while size:
        num_read = os.preadv(descriptor, [buffer[: min(_READ_BYTES, size)]], start)
        if not num_read:
            raise EOFError
        value = isal_zlib.crc32(buffer[:num_read], value)
        start, size = start + num_read, size - num_read
    return value


def check_checksums(
    archive: zipfile.ZipFile, view: View, *, compute: Callable[[int, int], int]
) -> None:
    """Compare an archive with its CRC-32s; `compute` takes the first byte and the length."""
    # A writer that computes no checksum leaves 0.
    for entry in (entry for entry in archive.infolist() if entry.CRC):
        if compute(data_offset(view, entry), entry.file_size) != entry.CRC:
            raise ValueError(f"the checksum of {entry.filename} is wrong")
