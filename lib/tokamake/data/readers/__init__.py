"""Readers of raw files, one module per format. A reader yields blocks of documents in file order.

The format is detected from the file's content. A reader module defines `UNIT` (what documents are
counted in: line or row), `HAS_MAGIC` (whether content alone identifies the format),
`HAS_BYTE_RANGES` (whether uncompressed files support byte ranges), `accepts(head, path)` and
`read(input, keys)`; and `READS_COLUMNS` if records have no other fields than `keys`; and
`IS_NAMED_ONLY` if the format is never detected, and the content is its own affair.
"""

import re
from pathlib import Path

from tokamake.data.readers._compression import SUFFIXES as COMPRESSION_SUFFIXES
from tokamake.data.readers._detect import look, sniff
from tokamake.data.readers._file_names import expand, in_natural_order, natural_key
from tokamake.data.readers._input import Input, readers, reading
from tokamake.data.readers._records import BadRecord, RecordBlock, Utf8, select_texts, value_of
from tokamake.errors import UserError

__all__ = [
    "COMPRESSION_SUFFIXES",
    "BadRecord",
    "ByteRange",
    "Input",
    "RecordBlock",
    "Utf8",
    "expand",
    "in_natural_order",
    "natural_key",
    "open_input",
    "parse_range",
    "select_texts",
    "sniff",
    "value_of",
]

ByteRange = tuple[int, int | None]
"""First byte and one past the last byte of an uncompressed file; None is the end of the file."""


def open_input(path: Path, *, byte_range: ByteRange | None = None, format: str = "") -> Input:
    """Open a raw file of any known format and compression.

    A `byte_range` of an uncompressed jsonl or parquet file holds the lines or row groups whose
    first byte lies in it.
    """
    kind, packing, head = look(path, format)
    raw = Input(path, kind, compression=packing, head=head)
    if byte_range and byte_range != (0, None):
        raw.start, raw.end = byte_range
        _check_range(raw)
    return raw


def parse_range(text: str, paths: list[Path]) -> ByteRange | None:
    """Parse a byte range START:END of a single file. END may be empty; empty text gives None."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+):(\d*)", text)
    if len(paths) != 1 or match is None:
        raise UserError(f"--byte-range {text}: give START:END in bytes, and a single file")
    return int(match[1]), int(match[2]) if match[2] else None


def _check_range(raw: Input) -> None:
    if raw.compression:
        raise UserError(f"{raw.path}: a compressed file has no byte ranges; read the whole file")
    if not readers()[raw.format].HAS_BYTE_RANGES:
        raise UserError(f"{raw.path}: {raw.format} files have no byte ranges; read the whole file")
    with reading(raw.path):
        size = raw.path.stat().st_size
    start, end = raw.start, raw.end
    if not 0 <= start <= (size if end is None else end) <= size:
        raise UserError(
            f"{raw.path}: byte range {start}:{'' if end is None else end} is outside the file "
            f"({size} bytes); rerun plan if the file has changed"
        )
