"""Reader of csv and tsv files with a header, compressed or not. Python's own module parses them.

All values are texts. A field in double quotes may hold separators and line feeds (RFC 4180).
"""

import csv
import io
import itertools
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokamake.data.readers._detect import content_suffix
from tokamake.data.readers._input import Input
from tokamake.data.readers._records import LONGEST_BYTES, BadRecord, RecordBlock, row_block
from tokamake.data.readers._table import BLOCK_BYTES, check_columns
from tokamake.errors import UserError
from tokamake.runtime.console import counted

UNIT = "row"
HAS_MAGIC = False
HAS_BYTE_RANGES = False
READS_COLUMNS = True

NAMES = {".csv": ",", ".tsv": "\t"}
"""Suffixes, and their usual separators of fields. Content alone cannot identify these files."""
_SEPARATORS = ",;\t|"
_MAX_CHARACTERS = LONGEST_BYTES // 8
"""Maximum size of a field, whose characters take 4 bytes each while the csv module reads it."""
_OVERHEAD = 32
"""Bytes that a row counts for in a block beside its characters."""


def accepts(head: bytes, path: Path) -> bool:
    return content_suffix(path) in NAMES


def columns(raw: Input) -> dict[str, bool]:
    """Names in the header, all of texts; the separator is the one that gives the most."""
    first = list(itertools.islice(_lines(raw), 1))
    header: list[str] = []
    for separator in (NAMES.get(content_suffix(raw.path), ","), *_SEPARATORS):
        with suppress(csv.Error):
            names = next(csv.reader(first, delimiter=separator, strict=True), [])
            header = max(header, names, key=len)
    return dict.fromkeys(header, True)


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the rows after the header as blocks."""
    csv.field_size_limit(_MAX_CHARACTERS)
    lines = _lines(raw)
    first = list(itertools.islice(lines, 1))
    separator = _separator(raw, first, keys=keys)
    rows = csv.reader(itertools.chain(first, lines), delimiter=separator, strict=True)
    number, line = 0, 1
    try:
        if (header := next(rows, None)) is None:
            raise UserError(f"{raw.path}: is empty; a csv file begins with the names of columns")
        _check_header(raw, header, keys=keys)
        columns = [header.index(key) for key in keys]
        records: list[dict[str, Any] | BadRecord] = []
        size, line = 0, rows.line_num + 1
        for row in rows:
            if len(row) == len(header):
                records.append(_record(row, keys, columns=columns, line=line))
            elif row:  # a blank line is no row
                reason = f"line {line} has {counted(len(row), 'field')}, the header {len(header)}"
                content = _joined(row, separator)
                records.append(BadRecord(f"{reason}; fix or remove the row", content))
            line = rows.line_num + 1
            size += sum(map(len, row)) + _OVERHEAD
            if size >= BLOCK_BYTES:
                yield row_block(records, number)
                number, records, size = number + len(records), [], 0
        if records:
            yield row_block(records, number)
    except csv.Error as error:
        raise _broken(f"{raw.path}:{line}", error) from None


def _separator(raw: Input, first: list[str], *, keys: tuple[str, ...]) -> str:
    """Return the character that separates the names of columns in the first line."""
    usual = NAMES.get(content_suffix(raw.path), ",")
    for separator in (usual, *_SEPARATORS):
        with suppress(csv.Error):
            if {*keys} <= {*next(csv.reader(first, delimiter=separator, strict=True), ())}:
                return separator
    return usual


def _check_header(raw: Input, header: list[str], *, keys: tuple[str, ...]) -> None:
    if not {*keys} & {*header}:
        names = ", ".join(f'"{name}"' for name in header[:20])
        raise UserError(
            f'{raw.path}: no column "{keys[0]}"; its first line names the columns {names}; fix '
            "text_key, or the separator: a comma in .csv, a tab in .tsv, or ; or |"
        )
    check_columns(raw, header, keys=keys)


def _broken(place: str, error: csv.Error) -> UserError:
    if "new-line" in str(error):
        return UserError(
            f"{place}: has a carriage return (\\r) without a line feed outside of quotes; convert "
            "the ends of lines: tr '\\r' '\\n' < FILE > NEW"
        )
    return UserError(
        f"{place}: not valid csv ({error}) in the row that begins here; fix its quotes: no later "
        "row is certain"
    )


def _lines(raw: Input) -> Iterator[str]:
    """Yield the lines with their ends; bytes that are not UTF-8 become surrogates."""
    parts: list[bytes] = []  # of a line that continues in the next chunk
    num_bytes, mark = 0, BOM_UTF8
    for chunk in itertools.chain(raw.chunks(), [b""]):
        *lines, rest = chunk.split(b"\n")
        if not lines and chunk:
            parts.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > LONGEST_BYTES:
                raise UserError(
                    f"{raw.path}: has a line of more than {LONGEST_BYTES:,} bytes; no csv file has "
                    "such lines: fix the file, or name its format"
                )
            continue
        for line in lines or [b""]:
            whole = b"".join([*parts, line]).removeprefix(mark)
            parts, mark = [], b""
            if lines or whole:
                yield whole.decode(errors="surrogateescape") + "\n" * bool(lines)
        parts = [rest] if rest else []
        num_bytes = len(rest)


def _joined(row: Sequence[str], separator: str) -> bytes:
    line = io.StringIO()
    csv.writer(line, delimiter=separator, lineterminator="").writerow(row)
    return line.getvalue().encode(errors="surrogateescape")


def _record(
    row: Sequence[str], keys: tuple[str, ...], *, columns: Sequence[int], line: int
) -> dict[str, Any] | BadRecord:
    for column in columns:
        if not row[column].isascii():
            try:
                row[column].encode()
            except UnicodeEncodeError as error:
                value = row[column].encode(errors="surrogateescape")
                return BadRecord(
                    f"line {line} is not valid UTF-8 (character {error.start} of the value); fix "
                    "or remove the row",
                    value,
                )
    return {key: row[column] for key, column in zip(keys, columns, strict=True)}
