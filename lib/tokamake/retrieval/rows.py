"""Rows of tables with tabs, and objects of jsonl files, with their places for messages."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tokamake.data.readers import COMPRESSION_SUFFIXES, ByteRange, Input
from tokamake.data.readers.jsonl import complete_parts, next_line
from tokamake.errors import UserError

WHOLE: ByteRange = (0, None)
_LONGEST_FIELD = 2**31 - 1
"""csv's own limit is 128 kB."""


class FileLine(NamedTuple):
    """A line of a file; its text, FILE:LINE, is for messages."""

    path: Path
    line: int
    """Number of the line in the byte range that is read, from 1."""
    first_byte: int
    """First byte of that range."""
    offset: int
    """First byte of the line, uncompressed."""

    def __str__(self) -> str:
        number, offset = self.line, 0
        if self.first_byte:  # lines before the range are counted for messages only
            with self.path.open("rb") as file:
                while offset < self.first_byte:
                    offset += len(file.readline())
                    number += 1
        return f"{self.path}:{number}"


def is_jsonl(path: Path) -> bool:
    """Whether the name of a file, compressed or not, is one of jsonl."""
    name = path.stem if is_compressed(path) else path.name
    return Path(name).suffix in (".jsonl", ".json")


def is_compressed(path: Path) -> bool:
    """Whether the name of a file is one of a compressed file, which has no byte ranges."""
    return path.suffix in COMPRESSION_SUFFIXES


def check_byte_range(path: Path, byte_range: ByteRange) -> None:
    """Refuse a byte range that a file does not have."""
    if byte_range == WHOLE or not path.is_file():
        return
    start, end = byte_range
    given, size = f"--byte-range: {start}:{'' if end is None else end}", path.stat().st_size
    if is_compressed(path):
        raise UserError(f"{given}: {path} is compressed, and has no byte ranges; unpack it")
    if not start <= (size if end is None else end) <= size:
        raise UserError(f"{given}: outside {path}, which has {size:,} bytes; fix the range")


def read_rows(path: Path, byte_range: ByteRange = WHOLE) -> Iterator[tuple[FileLine, list[str]]]:
    """Yield place and fields of each row of a tsv file; blank lines are left out.

    Fields may be in double quotes, as csv writes them and DPR's files have them. Of a byte range,
    rows count whose first byte lies in it.

    Raises:
        UserError: a line is not UTF-8, or a row is longer than a line.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    lines = _DecodedLines(path, byte_range)
    reader = csv.reader(lines, delimiter="\t")
    last = 0
    try:
        for row in reader:
            if reader.line_num > last + 1:
                raise UserError(
                    f'{lines.numbered(last + 1)}: a field begins with a " that its line does not '
                    'close; put the field in double quotes, with each " in it twice, or write jsonl'
                )
            last = reader.line_num
            if row:
                yield lines.place, row
    except csv.Error as error:
        where = lines.numbered(last + 1)
        raise UserError(f"{where}: not a row of a tsv file ({error}); fix it") from None


def read_objects(
    path: Path, byte_range: ByteRange = WHOLE
) -> Iterator[tuple[FileLine, dict[str, Any]]]:
    """Yield place and object of each line of a jsonl file; blank lines are left out.

    Of a byte range, lines count whose first byte lies in it.
    """
    lines = _DecodedLines(path, byte_range)
    for line in lines:
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise UserError(f"{lines.place}: not valid JSON ({error}); fix the line") from None
        if not isinstance(value, dict):
            raise UserError(f"{lines.place}: not a JSON object; fix the line")
        yield lines.place, value


class _DecodedLines:
    """Decoded lines of a file, or of a byte range.

    Attributes:
        place: of the last line.
    """

    def __init__(self, path: Path, byte_range: ByteRange) -> None:
        start, end = byte_range
        self._path, self._first = path, next_line(path, start)
        self._end = None if end is None else next_line(path, end)
        self.place = self.numbered(0)

    def numbered(self, line: int, offset: int = 0) -> FileLine:
        """A line by its number."""
        return FileLine(self._path, line, self._first, offset)

    def __iter__(self) -> Iterator[str]:
        offset = self._first
        try:
            for number, line in enumerate(self._raw_lines(), 1):
                if self._end is not None and offset >= self._end:
                    return
                self.place = self.numbered(number, offset)
                try:
                    yield line.decode("utf-8" if offset else "utf-8-sig")
                except UnicodeDecodeError:
                    raise UserError(f"{self.place}: not UTF-8; convert the file") from None
                offset += len(line)
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot be read ({error.strerror}); fix the path"
            ) from None

    def _raw_lines(self) -> Iterator[bytes]:
        if is_compressed(self._path):
            raw = Input(self._path, "jsonl", compression=self._path.suffix[1:], head=b"")
            for part in complete_parts(raw.chunks(), self._path):
                yield from io.BytesIO(part)
            return
        with self._path.open("rb") as file:
            file.seek(self._first)
            yield from file
