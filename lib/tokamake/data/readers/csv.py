"""Reader of csv and tsv files with a header, compressed or not. Python's own module parses them.

All values are texts. A field in double quotes may hold separators and line feeds (RFC 4180).
"""

import csv
import itertools
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokamake.data.readers._detect import content_suffix
from tokamake.data.readers._records import LONGEST_BYTES, BadRecord, RecordBlock
from tokamake.data.readers._table import BLOCK_BYTES, check_columns
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.readers._input import Input

UNIT = "row"
HAS_MAGIC = False
HAS_BYTE_RANGES = False

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Suffixes, and what separates fields. Content alone cannot identify these files."""
_OVERHEAD = 32
"""Bytes that a row counts for in a block beside its characters."""


def accepts(head: bytes, path: Path) -> bool:
    """Accept names of csv and tsv files."""
    return content_suffix(path) in _SEPARATORS


def read(raw: "Input", keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the rows after the header as blocks.

    Raises:
        UserError: a column is missing, or a quote is not closed, so that no later row is certain.
    """
    csv.field_size_limit(LONGEST_BYTES)
    separator = _SEPARATORS.get(content_suffix(raw.path), ",")
    rows = csv.reader(_lines(raw), delimiter=separator, strict=True)
    number = 0
    try:
        header = next(rows, None)
        if header is None:
            raise UserError(f"{raw.path}: is empty; a csv file begins with the names of columns")
        check_columns(raw, header, keys=keys)
        columns = [header.index(key) for key in keys]
        records: list[dict[str, Any] | BadRecord] = []
        size = 0
        for row in rows:
            if not row:  # a blank line
                continue
            records.append(_record(row, keys, columns=columns, num_fields=len(header)))
            size += sum(map(len, row)) + _OVERHEAD
            if size >= BLOCK_BYTES:
                yield _block(records, number)
                number, records, size = number + len(records), [], 0
        if records:
            yield _block(records, number)
    except csv.Error as error:
        raise UserError(
            f"{raw.path}:{rows.line_num}: not valid csv ({error}); fix the quotes: the rows after "
            "this line cannot be told apart"
        ) from None


def _lines(raw: "Input") -> Iterator[str]:
    """Yield the lines with their ends; bytes that are not UTF-8 become surrogates."""
    parts: list[bytes] = []  # of a line that goes on in the next chunk
    mark = BOM_UTF8
    for chunk in itertools.chain(raw.chunks(), [b""]):
        *lines, rest = chunk.split(b"\n")
        if not lines and chunk:
            parts.append(chunk)
            continue
        for line in lines or [b""]:
            whole = b"".join([*parts, line]).removeprefix(mark)
            parts, mark = [], b""
            if lines or whole:
                yield whole.decode(errors="surrogateescape") + "\n" * bool(lines)
        parts = [rest] if rest else []


def _record(
    row: Sequence[str], keys: tuple[str, ...], *, columns: Sequence[int], num_fields: int
) -> dict[str, Any] | BadRecord:
    if len(row) != num_fields:
        content = ",".join(row).encode(errors="surrogateescape")
        return BadRecord(
            f"has {len(row)} fields, the header has {num_fields}; fix or remove the row", content
        )
    for column in columns:
        if not row[column].isascii():
            try:
                row[column].encode()
            except UnicodeEncodeError as error:
                value = row[column].encode(errors="surrogateescape")
                return BadRecord(
                    f"not valid UTF-8 (character {error.start} of the value); fix or remove the "
                    "row",
                    value,
                )
    return {key: row[column] for key, column in zip(keys, columns, strict=True)}


def _block(records: list[dict[str, Any] | BadRecord], first_row: int) -> RecordBlock:
    numbers = np.arange(len(records), dtype=np.int64) + first_row
    return RecordBlock(records, numbers, np.full_like(numbers, -1), None)
