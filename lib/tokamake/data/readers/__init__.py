"""Readers of raw files, one module per format. A reader yields blocks of documents in file order.

Jobs compare the stamp of a file with the plan before and after they read the file: in another
version of it, byte ranges of other jobs would leave documents out or repeat them.

The format is detected from the file's content. A reader module defines `UNIT`, `HAS_MAGIC` (whether
content alone identifies the format), `HAS_BYTE_RANGES` (whether uncompressed files support byte
ranges), `accepts(head, path)` and `read(input, keys)`; and `READS_COLUMNS` if records have no other
fields than `keys`, and `columns(input)`, their names and whether they can be texts; `IS_NAMED_ONLY`
if the format is never detected; `IS_ONE_DOCUMENT` if a file is one document;
`READS_ALL_ENCODINGS` if files need not be UTF-8; `SETTINGS` (`_format_settings`);
and for byte ranges of compressed files, `DIVISIBLE` and `is_divisible(path, compression)`.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokamake.data.readers._compression import SUFFIXES as COMPRESSION_SUFFIXES
from tokamake.data.readers._detect import look, sniff
from tokamake.data.readers._file_names import expand, in_natural_order, natural_key
from tokamake.data.readers._format_settings import join_format, parse_format
from tokamake.data.readers._input import Input, is_one_document, readers, reading
from tokamake.data.readers._records import BadRecord, RecordBlock, Utf8, select_texts, value_of
from tokamake.errors import UserError

__all__ = [
    "COMPRESSION_SUFFIXES",
    "DECLARED",
    "BadRecord",
    "ByteRange",
    "Input",
    "RecordBlock",
    "Utf8",
    "all_keys",
    "expand",
    "file_stamp",
    "has_byte_ranges",
    "in_natural_order",
    "is_one_document",
    "join_format",
    "natural_key",
    "open_input",
    "open_unchanged",
    "parse_format",
    "parse_range",
    "read_stamp",
    "select_texts",
    "sniff",
    "value_of",
]
ByteRange = tuple[int, int | None]
"""First byte and one past the last byte of an uncompressed file; None is the end of the file."""
_JSON = ("json", "json_seq", "jsonl")
DECLARED = "declared"
"""Stamp of a file that did not exist when it was planned."""


def open_input(
    path: Path, *, byte_range: ByteRange | None = None, format: str = "", workers: int = 0
) -> Input:
    """Open a raw file of any known format and compression.

    A `byte_range` of an uncompressed jsonl or parquet file holds the lines or row groups whose
    first byte lies in it. Of a compressed multistream dump, it holds the streams that begin in it.
    `format` may have settings: `warc: {extractor: trafilatura}`. `workers` is the number of
    processes that extract texts.
    """
    name, settings = parse_format(format)
    kind, packing, head = look(path, name)
    raw = Input(path, kind, compression=packing, head=head)
    raw.settings |= settings
    raw.workers = workers or raw.workers
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


def has_byte_ranges(path: Path, format: str = "") -> bool:
    """Tell whether byte ranges of a file can be read; of a compressed one, after a look into it."""
    kind, packing = sniff(path, format)
    if packing:
        return packing in _divisible(kind) and readers()[kind].is_divisible(path, packing)
    return bool(readers()[kind].HAS_BYTE_RANGES)


def all_keys(raw: Input) -> dict[str, bool]:
    """Keys of the records of a file, and whether their values can be texts.

    None for JSON: its records have all their fields, also when a reader is asked for no key.
    """
    reader = readers()[raw.format]
    if getattr(reader, "READS_COLUMNS", False):
        columns: dict[str, bool] = reader.columns(raw)
        return columns
    return {} if raw.format in _JSON else {"text": True}


def _divisible(format: str) -> tuple[str, ...]:
    return getattr(readers()[format], "DIVISIBLE", ())


def _check_range(raw: Input) -> None:
    if raw.compression and raw.compression not in _divisible(raw.format):
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


def file_stamp(size: int, modified: int) -> str:
    """Return the stamp of a file: its size in bytes and its modification time in nanoseconds."""
    return f"{size}:{modified}"


def read_stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); put it back") from None
    return file_stamp(status.st_size, status.st_mtime_ns)


def open_unchanged(
    paths: Sequence[Path],
    stamps: Sequence[str],
    *,
    byte_range: ByteRange | None = None,
    format: str = "",
    workers: int = 0,
) -> Iterator[Input]:
    """Open raw files one after the other; the caller reads each to its end before the next.

    Without `stamps`, files must not change while they are read; with `stamps`, since the plan.
    """
    for path, planned in zip(paths, stamps or [DECLARED] * len(paths), strict=True):
        expected = read_stamp(path) if planned == DECLARED else planned
        _check(path, expected, when="since it was planned")
        before = _version(path)
        yield open_input(path, byte_range=byte_range, format=format, workers=workers)
        # Not sooner: the caller asks for the next file when it has read this one.
        _check(path, expected, when="while it was read")
        if _version(path) != before:
            raise UserError(
                f"{path}: written while it was read, and given its old time back; rerun when it is "
                "complete"
            )


def _version(path: Path) -> tuple[int, int]:
    """Inode, and time of the last change of the inode, which no program can set back."""
    status = path.stat()
    return status.st_ino, status.st_ctime_ns


def _check(path: Path, expected: str, *, when: str) -> None:
    if (actual := read_stamp(path)) != expected:
        raise UserError(
            f"{path}: changed {when} (bytes:time was {expected}, now {actual}); rerun when it is "
            "complete: the workflow plans it again"
        )
