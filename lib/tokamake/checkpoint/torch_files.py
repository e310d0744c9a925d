"""Files of torch.save without their tensors: what lies where in them, and how to lay them out.

Nothing that a file could run is run: only tensors, plain values and `argparse.Namespace` are read.
"""

import argparse
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tokamake.checkpoint.regions import Block, Region
from tokamake.errors import UserError

_CHUNK = 2**24
"""Bytes whose checksum is taken at once."""
_INERT = ("megatron.", "deepspeed.", "numpy.", "_codecs.")
"""Where classes and functions come from that checkpoints of Megatron and DeepSpeed name, for random
generators and settings; none is called, and what they would make is left out."""
_CENTRAL, _LOCAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x03\x04", b"PK\x07\x08"


@dataclass(frozen=True)
class Planned:
    """A tensor that a file shall hold."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    is_copy: bool = False
    """See `Region`."""


class Inert:
    """Stands for what a file names and we do not need; keeps nothing, does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Take nothing."""


def read(file: Path, remedy: str) -> Any:
    """What a file holds, its tensors without data.

    Args:
        file: written by torch.save.
        remedy: what to do where it is missing or damaged.

    Raises:
        UserError: it is missing, damaged, or holds what could be a program.
    """
    try:
        known: list[Any] = [argparse.Namespace, *_inert(file)]
        with torch.serialization.safe_globals(known), FakeTensorMode():
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {remedy}") from None
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{file}: holds more than tensors and plain values, so it is not read ({reason}); "
            f"{remedy}"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{file}: damaged ({reason}); {remedy}") from None


def _inert(file: Path) -> list[tuple[type, str]]:
    """What a file names that may stay unknown."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    return [(Inert, name) for name in names if name.startswith(_INERT)]


def region(file: Path, name: str, tensor: Tensor, blocks: tuple[Block, ...] = ()) -> Region:
    """Where a tensor lies that `read` has found."""
    storage: Any = tensor.untyped_storage()
    first = storage._checkpoint_offset + tensor.storage_offset() * tensor.dtype.itemsize
    stride = None if tensor.is_contiguous() else tensor.stride()
    return Region(file, name, first, tuple(tensor.shape), tensor.dtype, blocks, stride=stride)


def lay_out(file: Path, state: Any) -> list[Region]:
    """Write a file whose tensors are still zeros, which take no room on the disk yet.

    Args:
        file: to write.
        state: what torch.save would get, with `Planned` in the place of tensors.

    Returns:
        Where the tensors are to go.
    """
    mode = FakeTensorMode()
    with mode, torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(_replaced(state, lambda each: torch.empty(each.shape, dtype=each.dtype)), file)
    written = dict(leaves(read(file, "")))
    regions = []
    for name, planned in leaves(state):
        if isinstance(planned, Planned):
            found = region(file, name, written[name], planned.blocks)
            regions.append(
                Region(**{**vars(found), "is_copy": planned.is_copy}) if planned.is_copy else found
            )
    return regions


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


def _data_offset(stream: Any, entry: zipfile.ZipInfo) -> int:
    stream.seek(entry.header_offset)
    header = stream.read(30)
    if header[:4] != _LOCAL:
        raise UserError(f"{stream.name}: damaged at byte {entry.header_offset}; write it again")
    name, extra = struct.unpack("<HH", header[26:30])
    found: int = entry.header_offset + 30 + name + extra
    return found


def _checksum(stream: Any, entry: zipfile.ZipInfo) -> int:
    """CRC-32 of an entry's bytes, written into what follows them, too."""
    stream.seek(_data_offset(stream, entry))
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
