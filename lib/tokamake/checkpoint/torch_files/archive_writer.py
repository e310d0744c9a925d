"""Write files as torch.save does, with holes in place of the tensors' data.

Such a file is a zip archive without compression. `data.pkl` holds everything but the data, which
are in `data/0`, `data/1` ... and begin at multiples of 64 bytes. The checksums of the data stay 0
until `torch_archive.seal`.
"""

import os
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from tokamake.checkpoint.tensors.extents import PlannedTensor
from tokamake.checkpoint.torch_files import pickle_writer

_ALIGNMENT = 64
_FOLDER = "archive"
"""Folder of all members; torch accepts any name."""
_WIDE = 0xFFFFFFFF
"""Marks a 32-bit field whose value is in the zip64 field."""
_NEEDED = 45
"""Version of the zip format with zip64."""
_DATE = 0x21
"""1980-01-01, the earliest date of zip. A constant date keeps the bytes reproducible."""


class _ArchiveMember(NamedTuple):
    """A member of the archive."""

    name: bytes
    offset: int
    """Offset of its local header in the file."""
    size: int
    checksum: int


def write(file: Path, state: Any) -> list[tuple[PlannedTensor, int]]:
    """Write an argument of torch.save with `PlannedTensor` as tensors; return the data offsets."""
    planned: list[PlannedTensor] = []
    pickled = pickle_writer.dumps(state, partial(_rebuild_call, planned))
    members: list[_ArchiveMember] = []
    offsets: list[tuple[PlannedTensor, int]] = []
    with file.open("wb") as stream:
        for name, content in (
            ("data.pkl", pickled),
            (".format_version", b"1"),
            (".storage_alignment", f"{_ALIGNMENT}".encode()),
            ("byteorder", b"little"),
        ):
            members.append(_begin(stream, name, size=len(content), checksum=zlib.crc32(content)))
            stream.write(content)
        for number, tensor in enumerate(planned):
            members.append(_begin(stream, f"data/{number}", size=tensor.num_bytes, checksum=0))
            offsets.append((tensor, stream.tell()))
            stream.seek(tensor.num_bytes, os.SEEK_CUR)
        members.append(_begin(stream, "version", size=2, checksum=zlib.crc32(b"3\n")))
        stream.write(b"3\n")
        _write_directory(stream, members)
    return offsets


def _rebuild_call(planned: list[PlannedTensor], tensor: Any) -> pickle_writer.Call:
    """Return the call that rebuilds a tensor, as torch.save pickles it, and add it to `planned`."""
    assert isinstance(tensor, PlannedTensor), f"unsupported type {type(tensor).__name__}"
    storage = tensor.dtype.storage
    assert storage is not None, "dtypes of weights and states have a storage class"
    key = f"{len(planned)}"
    name = "storage", pickle_writer.Global("torch", storage), key, "cpu", tensor.numel
    planned.append(tensor)
    hooks = pickle_writer.Call(pickle_writer.Global("collections", "OrderedDict"), ())
    return pickle_writer.Call(
        pickle_writer.Global("torch._utils", "_rebuild_tensor_v2"),
        (pickle_writer.Persistent(name), 0, tensor.shape, tensor.stride, False, hooks),
    )


def _begin(stream: IO[bytes], name: str, *, size: int, checksum: int) -> _ArchiveMember:
    """Write a local header, padded so that the content begins at a multiple of the alignment."""
    member = _ArchiveMember(f"{_FOLDER}/{name}".encode(), stream.tell(), size, checksum)
    extra = _zip64_field(size, size) if size >= _WIDE else b""
    begin = member.offset + 30 + len(member.name) + len(extra) + 4
    padding = -begin % _ALIGNMENT
    # torch.save pads with a field of this name.
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    stream.write(
        b"PK\x03\x04" + _common_fields(member) + struct.pack("<HH", len(member.name), len(extra))
    )
    stream.write(member.name + extra)
    return member


def _common_fields(member: _ArchiveMember) -> bytes:
    """Fields of both the local header and the central one."""
    size = min(member.size, _WIDE)
    return struct.pack("<5H3I", _NEEDED, 0, 0, 0, _DATE, member.checksum, size, size)


def _zip64_field(*numbers: int) -> bytes:
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def _write_directory(stream: IO[bytes], members: list[_ArchiveMember]) -> None:
    """Write the central directory, with the end records of zip64 and of plain zip."""
    start = stream.tell()
    for member in members:
        numbers = [member.size] * 2 if member.size >= _WIDE else []
        numbers += [member.offset] if member.offset >= _WIDE else []
        extra = _zip64_field(*numbers) if numbers else b""
        lengths = len(member.name), len(extra), 0, 0, 0
        stream.write(b"PK\x01\x02" + struct.pack("<H", _NEEDED) + _common_fields(member))
        stream.write(struct.pack("<5HII", *lengths, 0, min(member.offset, _WIDE)))
        stream.write(member.name + extra)
    end, count = stream.tell(), len(members)
    size = end - start
    stream.write(b"PK\x06\x06" + struct.pack("<Q2H2I", 44, _NEEDED, _NEEDED, 0, 0))
    stream.write(struct.pack("<4Q", count, count, size, start))
    stream.write(b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1))
    capped = min(count, 0xFFFF)
    counts = struct.pack("<4H2IH", 0, 0, capped, capped, min(size, _WIDE), min(start, _WIDE), 0)
    stream.write(b"PK\x05\x06" + counts)
