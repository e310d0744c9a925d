"""Extents of tensors in files of safetensors: locate them, and lay files out.

A file has the length of its header (8 bytes, little-endian), the header (JSON, padded with spaces
to a multiple of 8 bytes), then the tensors, contiguous and without gaps.
"""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.extents import Extent, PlannedTensor
from tokamake.errors import UserError, reason_of

_DTYPES = {dtype.in_safetensors: dtype for dtype in dtypes.ALL if dtype.in_safetensors}
"""Dtypes by their names in a header."""
_ORDER = [*_DTYPES.values()]
"""Order of tensors in a file: larger elements first, so that all are aligned."""
_MAX_HEADER_BYTES = 100_000_000
"""Limit of safetensors itself."""


def read(file: Path, remedy: str) -> dict[str, Extent]:
    """Locate the tensors of a file, by name."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"its {size:,} bytes cannot hold a header of {length:,}")
            header = json.loads(stream.read(length))
        extents = _extents(file, header, start=8 + length)
        end = max((extent.offset + extent.num_bytes for extent in extents), default=8 + length)
        if end != size:
            raise ValueError(f"has {size:,} bytes, by its header {end:,}")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {remedy}") from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{file}: damaged ({reason_of(error)}); {remedy}") from None
    return {extent.name: extent for extent in extents}


def _extents(file: Path, header: Any, *, start: int) -> list[Extent]:
    """Return the extents of a header in file order; a damaged header raises any error."""
    extents, end = [], 0
    entries = [item for item in header.items() if item[0] != "__metadata__"]
    for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name} is {entry['dtype']}, which is not known")
        shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
            raise ValueError(f"tensor {name} has an invalid shape or offset")
        extent = Extent(file, name, start + first, shape, _DTYPES[entry["dtype"]])
        if first != end or last - first != extent.num_bytes:
            raise ValueError(f"tensor {name} has invalid data_offsets, {first:,} to {last:,}")
        extents.append(extent)
        end = last
    return extents


def lay_out(file: Path, planned: Mapping[str, PlannedTensor]) -> list[Extent]:
    """Write a file with a hole in place of the tensors; a hole takes no space on disk.

    Once filled, the file has the bytes that safetensors' own `save_file` writes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    offsets, end = [], 0
    for name, tensor in sorted(planned.items(), key=lambda it: (_ORDER.index(it[1].dtype), it[0])):
        header[name] = {
            "dtype": tensor.dtype.in_safetensors,
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.num_bytes],
        }
        offsets.append((name, end, tensor))
        end += tensor.num_bytes
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    start = 8 + len(content)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(content)) + content)
        stream.flush()
        os.truncate(stream.fileno(), start + end)
    return [tensor.extent(file, name, start + first) for name, first, tensor in offsets]
