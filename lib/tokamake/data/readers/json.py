"""Reader of JSON that is not jsonl: an array of documents, or objects that span several lines.

The file is parsed in memory as a whole.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from tokamake.data.readers._detect import content_suffix, first_line, parse_json_line
from tokamake.data.readers._input import Input
from tokamake.data.readers._records import (
    LONGEST_BYTES,
    BadRecord,
    RecordBlock,
    integer,
    read_all,
    row_block,
    utf8_fault,
    with_unicode,
)
from tokamake.data.readers.csv import NAMES as TABLE_NAMES
from tokamake.data.readers.text import NAMES as TEXT_NAMES
from tokamake.errors import UserError

UNIT = "row"
HAS_MAGIC = False
HAS_BYTE_RANGES = False

_SPACES = re.compile(r"[ \t\r\n]+")
_MAX_ROWS = 1 << 16


def accepts(head: bytes, path: Path) -> bool:
    """Accept JSON that is not jsonl, unless it is named like a text or a table."""
    return content_suffix(path) not in {*TEXT_NAMES, *TABLE_NAMES} and is_json(head)


def is_json(head: bytes) -> bool:
    """Whether content begins as an array of objects does, or with an object's line `{`."""
    line, is_complete = first_line(head)
    if line.startswith(b"["):
        items = parse_json_line(line) if is_complete else None
        # Lines with lists of other values are jsonl with bad documents.
        has_objects = not isinstance(items, list) or any(isinstance(item, dict) for item in items)
        return has_objects or items == []
    return is_complete and line.rstrip() == b"{"


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    yield from row_blocks(_values(raw, _content(raw).removeprefix(BOM_UTF8), keys=keys))


def table_rows(record: Any, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rows of an object of columns, as pandas writes it; none if it is no such object.

    Its values are lists of one length, or objects whose keys are the labels of rows.
    """
    columns = list(record.values()) if isinstance(record, dict) else []
    is_table = {type(column) for column in columns} in ({list}, {dict})
    if not is_table or not {*keys} <= {*record} or len(set(map(len, columns))) > 1:
        return []
    if isinstance(columns[0], dict):
        if any(column.keys() != columns[0].keys() for column in columns):
            return []
        record = {key: [record[key][label] for label in columns[0]] for key in keys}
    rows = zip(*(record[key] for key in keys), strict=True)
    return [dict(zip(keys, row, strict=True)) for row in rows]


def row_blocks(rows: list[Any]) -> Iterator[RecordBlock]:
    """Yield blocks of rows that count from 0."""
    for first in range(0, len(rows), _MAX_ROWS):
        records = [_record(row) for row in rows[first : first + _MAX_ROWS]]
        yield row_block(records, first)


def _content(raw: Input) -> bytes:
    if (data := read_all(raw.chunks(), LONGEST_BYTES)) is None:
        is_array = raw.head.removeprefix(BOM_UTF8).lstrip().startswith(b"[")
        to_lines = "jq -cn --stream 'fromstream(1|truncate_stream(inputs))'"
        raise UserError(
            f"{raw.path}: JSON of more than {LONGEST_BYTES:,} bytes is not read into memory; "
            f"convert it: {to_lines if is_array else 'jq -c .'} {raw.path} > NEW.jsonl"
        )
    return data


def _values(raw: Input, data: bytes, *, keys: tuple[str, ...]) -> list[Any]:
    """Return the items of an array, the rows of columns, or the values that follow one another."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        values = _values_leniently(raw, data, keys=keys)
    else:
        values = value if isinstance(value, list) else table_rows(value, keys) or [value]
    return values


def _values_leniently(raw: Input, data: bytes, *, keys: tuple[str, ...]) -> list[Any]:
    """Parse content that orjson refuses: several values, NaN, and texts that are no Unicode."""
    values: list[Any] = []
    try:
        text = data.decode()
        decoder, position = json.JSONDecoder(parse_int=integer, parse_constant=lambda _: None), 0
        while (position := _end_of_spaces(text, position)) < len(text):
            value, position = decoder.raw_decode(text, position)
            values += value if isinstance(value, list) else [value]
    except UnicodeDecodeError as error:
        remedy = "convert it: iconv -f LATIN1 -t UTF-8, or from its encoding"
        raise UserError(f"{raw.path}: {utf8_fault(error)}; {remedy}") from None
    except RecursionError:
        raise UserError(f"{raw.path}: its values are nested too deep; fix the file") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{raw.path}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}); fix "
            "the file, or fetch it again: the lost documents cannot be counted"
        ) from None
    return [with_unicode(value, keys) for value in values]


def _end_of_spaces(text: str, start: int) -> int:
    match = _SPACES.match(text, start)
    return match.end() if match else start


def _record(value: Any) -> dict[str, Any] | BadRecord:
    if isinstance(value, dict | BadRecord):
        return value
    return BadRecord(
        "not a JSON object with keys, as each row should be; fix or remove the row",
        json.dumps(value).encode(),
    )
