"""Files of torch.save without their tensors: where to find and how to lay them out."""

import math
import mmap
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokamake.checkpoint.files.torch_pickles import Located, data_offset, read
from tokamake.checkpoint.regions import Block, Region
from tokamake.errors import UserError

_CHUNK = 2**24
"""Bytes whose checksum is taken at once."""
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Flag of Linux: more may be mapped than there is memory. Python 3.13 names it."""
_CENTRAL, _LOCAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x03\x04", b"PK\x07\x08"


@dataclass(frozen=True)
class Planned:
    """A tensor that a file shall hold."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    is_copy: bool = False
    """See `Region`."""


def region(file: Path, name: str, tensor: Tensor, blocks: tuple[Block, ...] = ()) -> Region:
    """Where a tensor lies that `read` has found."""
    assert isinstance(tensor, Located)
    stride = None if tensor.is_contiguous() else tensor.stride()
    return Region(
        file, name, tensor.offset, tuple(tensor.shape), tensor.dtype, blocks, stride=stride
    )


def lay_out(file: Path, state: Any) -> list[Region]:
    """Write a file whose tensors are still zeros, which take no room on the disk yet.

    Args:
        file: to write.
        state: what torch.save would get, with `Planned` in the place of tensors.

    Returns:
        Where the tensors are to go.
    """
    with torch.serialization.skip_data():
        torch.save(_replaced(state, _unwritten), file)
    written = dict(leaves(read(file, "")))
    regions = []
    for name, planned in leaves(state):
        if isinstance(planned, Planned):
            found = region(file, name, written[name], planned.blocks)
            regions.append(
                Region(**{**vars(found), "is_copy": planned.is_copy}) if planned.is_copy else found
            )
    return regions


def _unwritten(planned: Planned) -> Tensor:
    """A tensor in memory that is never written to, so that it takes none."""
    size = math.prod(planned.shape) * planned.dtype.itemsize
    if not size:
        return torch.empty(planned.shape, dtype=planned.dtype)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, size, flags=kind)
    return torch.frombuffer(memory, dtype=planned.dtype).view(planned.shape)


def _replaced(state: Any, made: Callable[[Planned], Tensor]) -> Any:
    if isinstance(state, Planned):
        return made(state)
    if isinstance(state, Mapping):
        return {key: _replaced(value, made) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_replaced(value, made) for value in state)
    return state


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


def seal(file: Path) -> None:
    """Bring the checksums of a file that was laid out, and then filled, up to what is in it.

    torch itself does not compare them; other programs do.
    """
    with zipfile.ZipFile(file) as archive:
        entries = [entry for entry in archive.infolist() if entry.file_size and not entry.CRC]
        directory = archive.start_dir
    with file.open("r+b") as stream:
        sums = {entry.header_offset: _checksum(stream, entry) for entry in entries}
        for place, header in _directory(stream, directory):
            if header in sums:
                stream.seek(place + 16)
                stream.write(struct.pack("<I", sums[header]))


def _checksum(stream: Any, entry: zipfile.ZipInfo) -> int:
    """CRC-32 of an entry's bytes, written into what follows them, too."""
    stream.seek(data_offset(stream, entry))
    total, left = 0, entry.file_size
    while left:
        chunk = stream.read(min(_CHUNK, left))
        total, left = zlib.crc32(chunk, total), left - len(chunk)
    place = stream.tell()
    if stream.read(4) == _DESCRIPTOR:
        stream.seek(place + 4)
        stream.write(struct.pack("<I", total))
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
