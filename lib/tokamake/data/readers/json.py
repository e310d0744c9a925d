"""Reader of JSON that is not jsonl: an array of documents, or objects that span several lines.

The file is parsed in memory as a whole.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from tokamake.data.readers._detect import content_suffix, first_line, parse_json_line
from tokamake.data.readers._records import LONGEST_BYTES, BadRecord, RecordBlock
from tokamake.data.readers.csv import NAMES as TABLE_NAMES
from tokamake.data.readers.text import NAMES as TEXT_NAMES
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.readers._input import Input

UNIT = "row"
HAS_MAGIC = False
HAS_BYTE_RANGES = False

_SPACES = re.compile(r"[ \t\r\n]+")
_MAX_ROWS = 1 << 16
"""Rows of a block."""


def accepts(head: bytes, path: Path) -> bool:
    """Accept JSON that is not jsonl, unless the name is that of a text or a table."""
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


def read(raw: "Input", keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the documents of the file as blocks.

    Raises:
        UserError: the file is not JSON, or too large.
    """
    rows = _values(raw, _content(raw).removeprefix(BOM_UTF8))
    for first in range(0, len(rows), _MAX_ROWS):
        records = [_record(row) for row in rows[first : first + _MAX_ROWS]]
        numbers = np.arange(first, first + len(records), dtype=np.int64)
        yield RecordBlock(records, numbers, np.full_like(numbers, -1), None)


def _content(raw: "Input") -> bytes:
    chunks: list[bytes] = []
    size = 0
    for chunk in raw.chunks():
        chunks.append(chunk)
        size += len(chunk)
        if size > LONGEST_BYTES:
            is_array = raw.head.removeprefix(BOM_UTF8).lstrip().startswith(b"[")
            to_lines = "jq -cn --stream 'fromstream(1|truncate_stream(inputs))'"
            raise UserError(
                f"{raw.path}: JSON of more than {LONGEST_BYTES:,} bytes is not read into memory; "
                f"convert it: {to_lines if is_array else 'jq -c .'} {raw.path} > NEW.jsonl"
            )
    return b"".join(chunks)


def _values(raw: "Input", data: bytes) -> list[Any]:
    """Return the items of an array, or the values that follow one another."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return _values_leniently(raw, data)
    return value if isinstance(value, list) else [value]


def _values_leniently(raw: "Input", data: bytes) -> list[Any]:
    """Parse what orjson refuses: several values, NaN, and texts that are no Unicode."""
    values: list[Any] = []
    try:
        text = data.decode()
        decoder, position = json.JSONDecoder(parse_int=_integer), 0
        while (position := _end_of_spaces(text, position)) < len(text):
            value, position = decoder.raw_decode(text, position)
            values += value if isinstance(value, list) else [value]
    except UnicodeDecodeError as error:
        fault = f"not valid UTF-8 (0x{error.object[error.start]:02x} at byte {error.start:,})"
        raise UserError(
            f"{raw.path}: {fault}; convert it: iconv -f LATIN1 -t UTF-8, or what it is in"
        ) from None
    except RecursionError:
        raise UserError(f"{raw.path}: its values are nested too deep; fix the file") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{raw.path}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}); fix "
            "the file, or fetch it again: the lost documents cannot be counted"
        ) from None
    return [_strict(value) for value in values]


def _end_of_spaces(text: str, start: int) -> int:
    match = _SPACES.match(text, start)
    return match.end() if match else start


def _integer(text: str) -> int | float:
    """Parse an integer as orjson does: one of more than 64 bits becomes a float."""
    value = int(text) if len(text) <= 20 else float(text)
    return value if -(2**63) <= value < 2**64 else float(value)


def _strict(value: Any) -> Any:
    """Turn NaN into null; refuse what orjson refuses."""
    try:
        return orjson.loads(orjson.dumps(value))
    except (TypeError, ValueError) as error:
        return BadRecord(f"cannot be read ({error}); fix or remove the row", _original(value))


def _record(value: Any) -> dict[str, Any] | BadRecord:
    if isinstance(value, dict | BadRecord):
        return value
    return BadRecord(
        "not a JSON object with keys, as each row should be; fix or remove the row",
        _original(value),
    )


def _original(value: Any) -> bytes:
    return json.dumps(value).encode()
