"""Readers of raw files, one file per format: blocks of documents in the order of the file.

The format is told from a file's content. A reader module has `UNIT` (line or row), `SPLITS` (plain
files have byte ranges), `accepts(head, path)` and `read(input, keys)`.
"""

import re
from pathlib import Path

from tokamake.data.readers._detect import look, sniff
from tokamake.data.readers._file_names import expand, natural_key
from tokamake.data.readers._input import Input, readers, reading
from tokamake.data.readers._records import Bad, RecordBlock, Utf8
from tokamake.errors import UserError

__all__ = [
    "Bad",
    "ByteRange",
    "Input",
    "RecordBlock",
    "Utf8",
    "expand",
    "natural_key",
    "open_input",
    "parse_range",
    "sniff",
]

ByteRange = tuple[int, int | None]
"""First byte and one past the last of a plain file; None reads to its end."""


def open_input(path: Path, *, byte_range: ByteRange | None = None, format: str = "") -> Input:
    """Open a raw file, of any known format and compression.

    Args:
        path: the file.
        byte_range: part of a plain jsonl or parquet file: the lines or row groups whose first byte
            lies in it.
        format: name of the reader; empty: told from the file.

    Raises:
        UserError: the file cannot be read, is of no known format, or has no such range.
    """
    opened = Input(path, *look(path, format))
    if byte_range and byte_range != (0, None):
        opened.start, opened.end = byte_range
        _check_range(opened)
    return opened


def parse_range(text: str, paths: list[Path]) -> ByteRange | None:
    """Read a byte range START:END of a single file; END may be empty, an empty text is no range.

    Raises:
        UserError: it is no range, or there are several files.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d+):(\d*)", text)
    if len(paths) != 1 or match is None:
        raise UserError(f"--byte-range {text}: give START:END in bytes, and a single file")
    return int(match[1]), int(match[2]) if match[2] else None


def _check_range(opened: Input) -> None:
    if opened.compression:
        raise UserError(f"{opened.path}: a compressed file has no byte ranges; read it whole")
    if not readers()[opened.format].SPLITS:
        raise UserError(f"{opened.path}: {opened.format} files have no byte ranges; read it whole")
    with reading(opened.path):
        size = opened.path.stat().st_size
    start, end = opened.start, opened.end
    if not 0 <= start <= (size if end is None else end) <= size:
        raise UserError(
            f"{opened.path}: byte range {start}:{'' if end is None else end} of a file of {size} "
            "bytes; plan again if the file has changed"
        )
