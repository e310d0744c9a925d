"""Files of safetensors without their tensors: what lies where in them, and how to lay them out.

A file is the length of its header (8 bytes, little-endian), the header (JSON, filled up with spaces
to a multiple of 8), then the tensors, each row after row, one after the other.
"""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.extents import Extent, PlannedTensor
from tokamake.errors import UserError

_DTYPES = {dtype.in_safetensors: dtype for dtype in dtypes.ALL if dtype.in_safetensors}
"""By their names in a header."""

_ORDER = [*_DTYPES.values()]
"""Larger elements come first, so that all are aligned."""

_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors reads no longer one."""


def read(file: Path, remedy: str) -> dict[str, Extent]:
    """Where a file's tensors lie, by name.

    Args:
        file: of safetensors.
        remedy: what to do where it is missing or damaged.

    Raises:
        UserError: it is missing or damaged, or its length is not what its header says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"its {size:,} bytes cannot hold a header of {length:,}")
            header = json.loads(stream.read(length))
        found = _regions(file, header, 8 + length)
        end = max((each.offset + each.num_bytes for each in found), default=8 + length)
        if end != size:
            raise ValueError(f"has {size:,} bytes, by its header {end:,}")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {remedy}") from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{file}: damaged ({reason}); {remedy}") from None
    return {region.name: region for region in found}


def _regions(file: Path, header: Any, start: int) -> list[Extent]:
    """What a header describes, in the order of the file; ValueError and its like: it is none."""
    found, end = [], 0
    entries = [item for item in header.items() if item[0] != "__metadata__"]
    for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name} is {entry['dtype']}, which is not known")
        shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(each) is int and each >= 0 for each in (*shape, first, last)):
            raise ValueError(f"tensor {name} has no shape or no place")
        region = Extent(file, name, start + first, shape, _DTYPES[entry["dtype"]])
        if first != end or last - first != region.num_bytes:
            raise ValueError(f"tensor {name} lies in bytes {first:,} to {last:,}, which cannot be")
        found.append(region)
        end = last
    return found


def lay_out(file: Path, planned: Mapping[str, PlannedTensor]) -> list[Extent]:
    """Write a file whose tensors are still zeros, which take no room on the disk yet.

    It is, once filled, byte for byte what safetensors' own `save_file` writes.

    Args:
        file: to write.
        planned: its tensors by name.

    Returns:
        Where the tensors are to go.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    regions, end = [], 0
    for name, each in sorted(planned.items(), key=lambda it: (_ORDER.index(it[1].dtype), it[0])):
        place = {"data_offsets": [end, end + each.num_bytes]}
        header[name] = {"dtype": each.dtype.in_safetensors, "shape": each.shape, **place}
        regions.append((name, end, each))
        end += each.num_bytes
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    start = 8 + len(content)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(content)) + content)
        stream.flush()
        os.truncate(stream.fileno(), start + end)
    return [each.region(file, name, start + first) for name, first, each in regions]
