"""Files of torch.save without their tensors: where to find and how to lay them out."""

import functools
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from isal import isal_zlib

from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor
from tokamake.checkpoint.torch_files import archive_writer
from tokamake.checkpoint.torch_files.pickle_reader import Located, View, data_offset
from tokamake.errors import UserError

_CHUNK = 2**20
"""Bytes whose checksum is taken at once."""
_CENTRAL = b"PK\x01\x02"


def region(file: Path, name: str, tensor: Any, blocks: tuple[Chunk, ...] = ()) -> Extent:
    """Where a tensor lies that `torch_pickles.read` has found."""
    assert isinstance(tensor, Located)
    stride = None if tensor.is_contiguous else tensor.stride
    return Extent(file, name, tensor.offset, tensor.shape, tensor.dtype, blocks, stride=stride)


def lay_out(file: Path, state: Any) -> list[Extent]:
    """Write a file whose tensors are still zeros, which take no room on the disk yet.

    Args:
        file: to write.
        state: what torch.save would get, with `PlannedTensor` in the place of tensors.

    Returns:
        Where the tensors are to go.
    """
    places = archive_writer.write(file, state)
    names = (name for name, value in leaves(state) if isinstance(value, PlannedTensor))
    return [
        planned.region(file, name, offset)
        for name, (planned, offset) in zip(names, places, strict=True)
    ]


def leaves(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values in nested mappings and lists, by names with dots."""
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
    """Data in an archive whose checksum is not taken yet."""

    start: int
    size: int
    fields: tuple[int, int]
    """Where its checksum goes: before the data, and in the archive's directory."""


def seal(
    file: Path, *, archives: Iterable[tuple[int, int]] | None = None, workers: int = 1
) -> None:
    """Bring the checksums of a file that was laid out, and then filled, up to what is in it.

    torch itself does not compare them; other programs do.

    Args:
        file: to read, and to write its checksums into.
        archives: first byte and length of each archive in it; None: it is one.
        workers: checksums that are taken at once.
    """
    with file.open("r+b") as stream, ThreadPoolExecutor(workers) as pool:
        parts = [(0, file.stat().st_size)] if archives is None else archives
        found = [each for start, length in parts for each in _unsealed(stream, start, length)]
        take = functools.partial(checksum, stream.fileno())
        sums = pool.map(take, (each.start for each in found), (each.size for each in found))
        for each, total in zip(found, sums, strict=True):
            for field in each.fields:  # cut off between, it is done again
                stream.seek(field)
                stream.write(struct.pack("<I", total))


def _unsealed(stream: IO[bytes], start: int, length: int) -> Iterator[_Unsealed]:
    """Data without checksums in an archive, which is some bytes of a file."""
    view = View(stream, start, length)
    with zipfile.ZipFile(view) as archive:
        entries = [entry for entry in archive.infolist() if entry.file_size and not entry.CRC]
        directory = archive.start_dir
    place_of = {header: place for place, header in _directory(view, directory)}
    for entry in entries:
        header = entry.header_offset
        fields = start + header + 14, start + place_of[header] + 16
        yield _Unsealed(start + data_offset(view, entry), entry.file_size, fields)


def checksum(descriptor: int, start: int, size: int) -> int:
    """CRC-32 of some bytes of a file.

    Raises:
        EOFError: it ends before.
    """
    total, buffer = 0, memoryview(bytearray(min(_CHUNK, size)))
    while size:
        read = os.preadv(descriptor, [buffer[: min(_CHUNK, size)]], start)
        if not read:
            raise EOFError
        total = isal_zlib.crc32(buffer[:read], total)
        start, size = start + read, size - read
    return total


def _directory(stream: Any, start: int) -> Iterator[tuple[int, int]]:
    """Where entries of a central directory begin, and the local headers that they are about."""
    stream.seek(start)
    while (header := stream.read(46))[:4] == _CENTRAL:
        place = stream.tell() - 46
        name, extra, comment = struct.unpack("<HHH", header[28:34])
        (offset,) = struct.unpack("<I", header[42:46])
        stream.seek(place + 46 + name)
        if offset == 0xFFFFFFFF:
            offset = _wide_offset(stream.read(extra), header)
        yield place, offset
        stream.seek(place + 46 + name + extra + comment)


def _wide_offset(extra: bytes, header: bytes) -> int:
    """A header's place beyond 4 GB, from the zip64 field: after the sizes that are as large."""
    while extra:
        kind, size = struct.unpack("<HH", extra[:4])
        if kind == 1:
            sizes = struct.unpack("<II", header[20:28])
            skipped = sum(8 for each in sizes if each == 0xFFFFFFFF)
            found: int = struct.unpack("<Q", extra[4 + skipped : 12 + skipped])[0]
            return found
        extra = extra[4 + size :]
    raise UserError("zip file: an entry beyond 4 GB has no place; write it again")
