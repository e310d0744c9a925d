"""Reads jsonl, plain or compressed: one JSON object a line; blank lines are no documents."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import orjson
from numpy.typing import NDArray

from tokamake._csrc import json_texts
from tokamake.data.readers._detect import first_line, kind_of_name
from tokamake.data.readers._input import CHUNK_BYTES, reading
from tokamake.data.readers._records import LONGEST_BYTES, Bad, Lines, RecordBlock, Utf8
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


def read(raw: "Input", keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the lines of a file, or those whose first byte lies in a range, as blocks."""
    _refuse_spread(raw)
    position, end = _whole_lines(raw)
    raw.first_byte = position
    number = 1
    for lines in _whole(raw.chunks(position, end), raw.path):
        plain = json_texts(lines, keys[0]) if len(keys) == 1 else None
        each = [] if plain else _cut(lines)
        ends = plain[2] if plain else np.cumsum([len(line) + 1 for line in each]) - 1
        starts = np.concatenate(([0], ends[:-1] + 1))
        offsets = np.full(len(ends), -1) if raw.compression else starts + position
        numbers = np.arange(number, number + len(ends), dtype=np.int64)
        number, position = number + len(ends), position + len(lines)
        if plain:
            views = _Views(lines, starts, ends)
            yield RecordBlock(_Records(views), numbers, offsets, Lines(views), Utf8(*plain[:2]))
        for first in range(0, len(each), _MOST_LINES):
            part = slice(first, first + _MOST_LINES)
            block = _block(each[part], numbers[part], offsets[part])
            raw.blank_lines += len(each[part]) - len(block.records)
            if block.records:
                yield block


class _Views(Sequence[memoryview]):
    """Lines, each a view of all when it is asked for: nearly none of them is."""

    def __init__(self, lines: Line, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self._lines, self._starts, self._ends = memoryview(lines), starts, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._lines[self._starts[index] : self._ends[index]]


class _Records(Sequence[dict[str, Any] | Bad]):
    """Records of lines whose texts are read already, parsed when they are asked for."""

    def __init__(self, lines: _Views) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any] | Bad: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any] | Bad]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return _parse(list(self._lines[index]))
        return (_parse([self._lines[index]]) or [])[0]


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


def _whole(chunks: Iterable[bytes], path: Path) -> Iterator[Line]:
    """Whole lines, some at a time, with their line feeds; only what is new is searched for them."""
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        begin, end = 0, chunk.rfind(b"\n") + 1
        if end and waiting:
            begin = chunk.find(b"\n") + 1
            yield b"".join([*waiting, chunk[:begin]])
            waiting, size = [], 0
        if begin < end:
            yield memoryview(chunk)[begin:end]
        if end < len(chunk):
            waiting.append(chunk[end:])
            size += len(waiting[-1])
        if size > LONGEST_BYTES:
            raise UserError(
                f"{path}: a line is longer than {LONGEST_BYTES} bytes; "
                "is it jsonl, with line feeds as line ends?"
            )
    if waiting:
        yield b"".join(waiting)


def _cut(lines: Line) -> list[Line]:
    """Whole lines, one by one: long lines as views, which takes a sixth of the time."""
    whole = bytes(lines).removesuffix(b"\n")
    if whole.count(b"\n", 0, _FIRST_STEP) * _SHORT_BYTES > _FIRST_STEP:
        return list(whole.split(b"\n"))
    view, each, start = memoryview(whole), [], 0
    while (end := whole.find(b"\n", start)) >= 0:
        each.append(view[start:end])
        start = end + 1
    return [*each, view[start:]]


def _block(
    lines: list[Line], numbers: NDArray[np.int64], offsets: NDArray[np.int64]
) -> RecordBlock:
    records = _parse(lines)
    if records is None:
        full = [index for index, line in enumerate(lines) if not _blank(line)]
        numbers, offsets = numbers[full], offsets[full]
        lines = [lines[index] for index in full]
        records = _parse(lines) or []
    return RecordBlock(records, numbers, offsets, Lines(lines))


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
