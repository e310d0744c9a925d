"""Writes files as torch.save does, with holes where tensors' data go.

Such a file is a zip archive without compression: `data.pkl` with all but tensors' data, which are
in `data/0`, `data/1` ... and begin at multiples of 64 bytes. Checksums of data are left at 0.
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
"""What torch puts all entries in; any name will do."""
_WIDE = 0xFFFFFFFF
"""Stands for a number that is in the field of zip64."""
_NEEDED = 45
"""Version of the zip format that has zip64."""
_DATE = 0x21
"""The first day that a zip archive can tell, 1980-01-01."""


class _Entry(NamedTuple):
    """What is in the archive."""

    name: bytes
    offset: int
    """Of its header."""
    size: int
    checksum: int


def write(file: Path, state: Any) -> list[tuple[PlannedTensor, int]]:
    """Write a file.

    Args:
        file: to write.
        state: what torch.save would get, with `PlannedTensor` in the place of tensors.

    Returns:
        Each of the tensors, with the first byte of its data, in the order of the state.
    """
    planned: list[PlannedTensor] = []
    pickled = pickle_writer.dumps(state, partial(_rebuilt, planned))
    entries: list[_Entry] = []
    places: list[tuple[PlannedTensor, int]] = []
    with file.open("wb") as stream:
        for name, content in (
            ("data.pkl", pickled),
            (".format_version", b"1"),
            (".storage_alignment", f"{_ALIGNMENT}".encode()),
            ("byteorder", b"little"),
        ):
            entries.append(_begin(stream, name, len(content), zlib.crc32(content)))
            stream.write(content)
        for number, each in enumerate(planned):
            entries.append(_begin(stream, f"data/{number}", each.num_bytes, 0))
            places.append((each, stream.tell()))
            stream.seek(each.num_bytes, os.SEEK_CUR)
        entries.append(_begin(stream, "version", 2, zlib.crc32(b"3\n")))
        stream.write(b"3\n")
        _end(stream, entries)
    return places


def _rebuilt(met: list[PlannedTensor], planned: Any) -> pickle_writer.Call:
    """How torch.save says a tensor, which is added to those that were met before."""
    assert isinstance(planned, PlannedTensor), f"torch.save is to write no {type(planned).__name__}"
    kind = planned.dtype.storage
    assert kind is not None, "what weights and states are kept in, torch.save knows"
    name = "storage", pickle_writer.Global("torch", kind), f"{len(met)}", "cpu", planned.numel
    met.append(planned)
    hooks = pickle_writer.Call(pickle_writer.Global("collections", "OrderedDict"), ())
    return pickle_writer.Call(
        pickle_writer.Global("torch._utils", "_rebuild_tensor_v2"),
        (pickle_writer.Persistent(name), 0, planned.shape, planned.stride, False, hooks),
    )


def _begin(stream: IO[bytes], name: str, size: int, checksum: int) -> _Entry:
    """Write an entry's header, so long that what it is about begins where it should."""
    entry = _Entry(f"{_FOLDER}/{name}".encode(), stream.tell(), size, checksum)
    extra = _wide(size, size) if size >= _WIDE else b""
    begin = entry.offset + 30 + len(entry.name) + len(extra) + 4
    padding = -begin % _ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    stream.write(b"PK\x03\x04" + _about(entry) + struct.pack("<HH", len(entry.name), len(extra)))
    stream.write(entry.name + extra)
    return entry


def _about(entry: _Entry) -> bytes:
    """What both headers of an entry say."""
    size = min(entry.size, _WIDE)
    return struct.pack("<5H3I", _NEEDED, 0, 0, 0, _DATE, entry.checksum, size, size)


def _wide(*numbers: int) -> bytes:
    """The field of zip64."""
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def _end(stream: IO[bytes], entries: list[_Entry]) -> None:
    """Write the central directory."""
    start = stream.tell()
    for entry in entries:
        numbers = [entry.size] * 2 if entry.size >= _WIDE else []
        numbers += [entry.offset] if entry.offset >= _WIDE else []
        extra = _wide(*numbers) if numbers else b""
        lengths = len(entry.name), len(extra), 0, 0, 0
        stream.write(b"PK\x01\x02" + struct.pack("<H", _NEEDED) + _about(entry))
        stream.write(struct.pack("<5HII", *lengths, 0, min(entry.offset, _WIDE)))
        stream.write(entry.name + extra)
    end, count = stream.tell(), len(entries)
    size = end - start
    stream.write(b"PK\x06\x06" + struct.pack("<Q2H2I", 44, _NEEDED, _NEEDED, 0, 0))
    stream.write(struct.pack("<4Q", count, count, size, start))
    stream.write(b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1))
    some = min(count, 0xFFFF)
    counts = struct.pack("<4H2IH", 0, 0, some, some, min(size, _WIDE), min(start, _WIDE), 0)
    stream.write(b"PK\x05\x06" + counts)
