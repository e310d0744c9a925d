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
    """Accept an array with objects, and objects whose first line is not complete JSON."""
    if content_suffix(path) in {*TEXT_NAMES, *TABLE_NAMES}:
        return False
    line, is_complete = first_line(head)
    if line.startswith(b"["):
        items = parse_json_line(line) if is_complete else None
        # Lines with lists of other values are jsonl with bad documents.
        return not isinstance(items, list) or any(isinstance(item, dict) for item in items)
    return is_complete and line.rstrip() == b"{"


def read(raw: "Input", keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the documents of the file as blocks.

    Raises:
        UserError: the file is not JSON, or too large.
    """
    chunks: list[bytes] = []
    size = 0
    for chunk in raw.chunks():
        chunks.append(chunk)
        size += len(chunk)
        if size > LONGEST_BYTES:
            raise UserError(
                f"{raw.path}: JSON of more than {LONGEST_BYTES:,} bytes is not read into memory; "
                f"convert it: jq -cn --stream 'fromstream(1|truncate_stream(inputs))' {raw.path} > "
                "NEW.jsonl"
            )
    rows = _values(raw, b"".join(chunks).removeprefix(BOM_UTF8))
    for first in range(0, len(rows), _MAX_ROWS):
        records = [_record(row) for row in rows[first : first + _MAX_ROWS]]
        numbers = np.arange(first, first + len(records), dtype=np.int64)
        yield RecordBlock(records, numbers, np.full_like(numbers, -1), None)


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
        position = 0
        while (position := _end_of_spaces(text, position)) < len(text):
            value, position = json.JSONDecoder().raw_decode(text, position)
            values += value if isinstance(value, list) else [value]
    except UnicodeDecodeError as error:
        fault = f"not valid UTF-8 (0x{error.object[error.start]:02x} at byte {error.start:,})"
        raise UserError(f"{raw.path}: {fault}; convert it: iconv -f LATIN1 -t UTF-8") from None
    except RecursionError:
        raise UserError(f"{raw.path}: its values are nested too deep; fix the file") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{raw.path}:{error.lineno}: not valid JSON ({error.msg}); fix the file, or fetch it "
            "again: the lost documents cannot be counted"
        ) from None
    return [_strict(value) for value in values]


def _end_of_spaces(text: str, start: int) -> int:
    match = _SPACES.match(text, start)
    return match.end() if match else start


def _strict(value: Any) -> Any:
    """Turn NaN into null; refuse what orjson refuses."""
    try:
        return orjson.loads(orjson.dumps(value))
    except (TypeError, ValueError) as error:
        return BadRecord(f"cannot be read ({error}); fix or remove the row", _content(value))


def _record(value: Any) -> dict[str, Any] | BadRecord:
    if isinstance(value, dict | BadRecord):
        return value
    return BadRecord(
        "not a JSON object with keys, as each row should be; fix or remove the row", _content(value)
    )


def _content(value: Any) -> bytes:
    return json.dumps(value).encode()
