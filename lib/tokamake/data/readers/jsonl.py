"""Reads jsonl, plain or compressed: one JSON object a line; blank lines are no documents."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tokamake.data.readers._block import LONGEST_BYTES, Bad, Block, Lines
from tokamake.data.readers._input import CHUNK_BYTES, reading
from tokamake.data.readers._sniff import first_line, kind_of_name
from tokamake.data.readers.text import NAMES as TEXT_NAMES
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.readers import Input

UNIT = "line"
SPLITS = True

_BOM = b"\xef\xbb\xbf"
_MOST_LINES = 1 << 16  # of a block: the records of tiny documents take much memory
_FIRST_STEP = 1 << 16  # bytes searched for the end of a line at first
_SHORT_BYTES = 256  # lines shorter than that are copied faster than looked at in place

Line = bytes | memoryview


def accepts(head: bytes, path: Path) -> bool:
    """Take what begins like JSON, is blank, or is named so and not binary."""
    line, whole = first_line(head)
    if kind_of_name(path) in TEXT_NAMES:
        return line.startswith(b"{") and (not whole or isinstance(_loads(line), dict))
    named = kind_of_name(path) in (".jsonl", ".ndjson", ".json")
    return line[:1] in (b"{", b"[", b"") or (named and b"\0" not in head)


def read(raw: "Input", keys: tuple[str, ...]) -> Iterator[Block]:
    """Yield the lines of a file, or those whose first byte lies in a range, as blocks."""
    _refuse_spread(raw)
    position, end = _whole_lines(raw)
    raw.first_byte = position
    number = 1
    for lines in _lines(raw.chunks(position, end), raw.path):
        ends = position + np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)) + 1)
        offsets = np.concatenate(([position], ends[:-1]))
        numbers = np.arange(number, number + len(lines), dtype=np.int64)
        number, position = number + len(lines), int(ends[-1])
        if raw.compression:
            offsets.fill(-1)
        for first in range(0, len(lines), _MOST_LINES):
            part = slice(first, first + _MOST_LINES)
            block = _block(lines[part], numbers[part], offsets[part])
            raw.blank_lines += len(lines[part]) - len(block.records)
            if block.records:
                yield block


def _refuse_spread(raw: "Input") -> None:
    """Refuse JSON that is not one object a line, before it is read into memory as one line."""
    line, whole = first_line(raw.head)
    if line.startswith(b"["):
        items = _loads(line) if whole else None
        # A line with a list of other things is a bad document like any other.
        if not isinstance(items, list) or any(isinstance(item, dict) for item in items):
            raise UserError(
                f"{raw.path}: is a JSON array, not one JSON object a line; convert it: "
                f"jq -c '.[]' {raw.path} > NEW.jsonl"
            )
    if whole and line.rstrip() == b"{":
        raise UserError(
            f"{raw.path}: its JSON objects are spread over several lines; convert it: "
            f"jq -c . {raw.path} > NEW.jsonl"
        )


def _loads(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def _whole_lines(raw: "Input") -> tuple[int, int | None]:
    """Byte range of the lines whose first byte lies in the range asked for."""
    if not raw.start and raw.end is None:
        return 0, None
    start = _line_start(raw.path, raw.start)
    return start, None if raw.end is None else max(start, _line_start(raw.path, raw.end))


def _line_start(path: Path, position: int) -> int:
    """First byte, at or after a position, where a line begins; or the end of the file."""
    if not position:
        return 0
    with reading(path), path.open("rb", buffering=0) as stream:
        stream.seek(position - 1)
        found = position - 1
        size = _FIRST_STEP
        while chunk := stream.read(size):
            if (cut := chunk.find(b"\n")) >= 0:
                return found + cut + 1
            found += len(chunk)
            size = CHUNK_BYTES
    return found


def _lines(chunks: Iterable[bytes], path: Path) -> Iterator[list[Line]]:
    """Lines without line feeds, as they come; only what is new is searched for the end of one."""
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        lines = _cut(chunk)
        if len(lines) > 1:
            lines[0] = b"".join([*waiting, lines[0]])
            waiting, size = [], 0
        waiting.append(bytes(lines.pop()))
        size += len(waiting[-1])
        if size > LONGEST_BYTES:
            raise UserError(
                f"{path}: a line is longer than {LONGEST_BYTES} bytes; "
                "is it jsonl, with line feeds as line ends?"
            )
        if lines:
            yield lines
    if size:
        yield [b"".join(waiting)]


def _cut(chunk: bytes) -> list[Line]:
    """A chunk cut at its line feeds: long lines as views, which takes a sixth of the time."""
    if chunk.count(b"\n", 0, _FIRST_STEP) * _SHORT_BYTES > _FIRST_STEP:
        return list(chunk.split(b"\n"))
    view, lines, start = memoryview(chunk), [], 0
    while (end := chunk.find(b"\n", start)) >= 0:
        lines.append(view[start:end])
        start = end + 1
    return [*lines, view[start:]]


def _block(lines: list[Line], numbers: NDArray[np.int64], offsets: NDArray[np.int64]) -> Block:
    records = _parse(lines)
    if records is None:
        full = [index for index, line in enumerate(lines) if not _blank(line)]
        numbers, offsets = numbers[full], offsets[full]
        lines = [lines[index] for index in full]
        records = _parse(lines) or []
    return Block(records, numbers, offsets, Lines(lines))


def _blank(line: Line) -> bool:
    return not line or not bytes(line).removeprefix(_BOM).strip()


def _parse(lines: list[Line]) -> list[dict[str, Any] | Bad] | None:
    """Records of all lines, or None if a line is blank: a failure for each would cost too much."""
    records: list[Any] = []
    rest = iter(lines)
    while len(records) < len(lines):
        try:
            records.extend(map(orjson.loads, rest))  # keeps what came before an error
        except orjson.JSONDecodeError as error:
            line = bytes(lines[len(records)])
            if _blank(line):
                return None
            records.append(_salvage(line.removeprefix(_BOM), error))
    if not set(map(type, records)) <= {dict, Bad}:
        records = [_object(record) for record in records]
    return records


def _object(record: Any) -> dict[str, Any] | Bad:
    if isinstance(record, dict | Bad):
        return record
    return Bad("not a JSON object with keys, as each line should be; mend or remove the line")


def _salvage(line: bytes, error: orjson.JSONDecodeError) -> Any:
    """Parse what orjson is too strict for: a byte order mark, and the NaN that Python writes."""
    with suppress(ValueError, TypeError, RecursionError):
        return orjson.loads(line)
    if b"NaN" in line or b"Infinity" in line:
        with suppress(ValueError, TypeError, RecursionError):
            return orjson.loads(orjson.dumps(json.loads(line)))  # NaN becomes null
    return Bad(_reason(line, error))


def _reason(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return (
            f"not valid UTF-8 (0x{line[wrong.start]:02x} at byte {wrong.start} of the line); "
            "convert the file to UTF-8, or mend or remove the line"
        )
    if "surrogate" in error.msg:
        return f"a lone surrogate is no text ({_where(error)}); mend or remove the line"
    if "depth" in error.msg or "ecursion" in error.msg:
        return f"nested too deep ({_where(error)}); mend or remove the line"
    if "content after" in error.msg and b"\r" in line.rstrip():
        return "lone CR as line end; turn it into a line feed: tr '\\r' '\\n'"
    if "content after" in error.msg:
        return f"more than one JSON value in a line ({_where(error)}); give each a line: jq -c ."
    return f"not valid JSON ({_where(error)}); mend or remove the line"


def _where(error: orjson.JSONDecodeError) -> str:
    return f"{error.msg} at character {error.pos}"
