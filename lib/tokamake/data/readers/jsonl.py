"""Reader of jsonl, compressed or not: one JSON object per line. Blank lines are not documents."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tokamake._csrc import json_texts
from tokamake.data.readers._detect import content_suffix, first_line, parse_json_line
from tokamake.data.readers._input import CHUNK_BYTES, Input, reading
from tokamake.data.readers._records import (
    LONGEST_BYTES,
    BadRecord,
    LazySequence,
    Lines,
    RecordBlock,
    Utf8,
    integer,
    utf8_fault,
    with_unicode,
)
from tokamake.data.readers.json import is_json, row_blocks, table_rows
from tokamake.data.readers.text import NAMES as TEXT_NAMES
from tokamake.errors import UserError

UNIT = "line"
HAS_MAGIC = False
HAS_BYTE_RANGES = True

_BOM = b"\xef\xbb\xbf"
_MAX_LINES = 1 << 16  # per block: the records of tiny documents take much memory
_FIRST_STEP = 1 << 16  # bytes of the first search for the end of a line
_SHORT_BYTES = 256  # copying a line up to this size is faster than making a view of it

LineBytes = bytes | memoryview


def accepts(head: bytes, path: Path) -> bool:
    """Accept content that begins like JSON or is blank, and other text with a JSON suffix."""
    line, is_complete = first_line(head)
    if content_suffix(path) in TEXT_NAMES:
        # TeX and Markdown may begin with a brace too: the line must be a JSON object.
        return line.startswith(b"{") and (
            not is_complete or isinstance(parse_json_line(line), dict)
        )
    has_json_name = content_suffix(path) in (".jsonl", ".ndjson", ".json")
    return line[:1] in (b"{", b"[", b"") or (has_json_name and b"\0" not in head)


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the lines of a file, or lines whose first byte lies in a byte range, as blocks.

    A file with a single line may be an object of columns; then its rows are the documents.
    """
    if is_json(raw.head):  # and its format is given
        raise UserError(f"{raw.path}: is not one JSON object per line; give it the format json")
    blocks = _blocks(raw, keys)
    first = list(islice(blocks, 1))
    if not raw.start and raw.end is None and first and len(first[0].records) == 1:
        first += islice(blocks, 1)
        rows = table_rows(first[0].records[0], keys) if len(first) == 1 else []
        if rows:
            raw.unit = "row"
            first = list(row_blocks(rows))
    yield from chain(first, blocks)


def _blocks(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    position, end = _line_range(raw)
    raw.first_byte = position
    number = 1
    for chunk in complete_parts(raw.chunks(position, end), raw.path):
        # The parser of lib/csrc returns None if any line is unusual: then orjson parses them all.
        texts = json_texts(chunk, keys[0]) if len(keys) == 1 else None
        lines = [] if texts else _split(chunk)
        ends = texts[2] if texts else np.cumsum([len(line) + 1 for line in lines]) - 1
        starts = np.concatenate(([0], ends[:-1] + 1))
        offsets = np.full(len(ends), -1) if raw.compression else starts + position
        numbers = np.arange(number, number + len(ends), dtype=np.int64)
        number, position = number + len(ends), position + len(chunk)
        if texts:
            views = _LineViews(chunk, starts, ends=ends)
            yield RecordBlock(_LazyRecords(views), numbers, offsets, Lines(views), Utf8(*texts[:2]))
        for first in range(0, len(lines), _MAX_LINES):
            part = slice(first, first + _MAX_LINES)
            block = _block(lines[part], numbers[part], offsets=offsets[part], keys=keys)
            raw.blank_lines += len(lines[part]) - len(block.records)
            if block.records:
                yield block


class _LineViews(LazySequence[memoryview]):
    """Views of the lines in a chunk, made on access: hardly any line is accessed."""

    def __init__(
        self, chunk: LineBytes, starts: NDArray[np.int64], *, ends: NDArray[np.int64]
    ) -> None:
        self._chunk, self._starts, self._ends = memoryview(chunk), starts, ends

    def __len__(self) -> int:
        return len(self._ends)

    def item(self, index: int) -> memoryview:
        return self._chunk[self._starts[index] : self._ends[index]]


class _LazyRecords(LazySequence[dict[str, Any] | BadRecord]):
    """Records of lines, parsed on access. Their texts are already known."""

    def __init__(self, lines: _LineViews) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def item(self, index: int) -> dict[str, Any] | BadRecord:
        return (parse([self._lines[index]], ()) or [])[0]


def _line_range(raw: Input) -> tuple[int, int | None]:
    """Return the byte range of the lines whose first byte lies in the requested range."""
    if not raw.start and raw.end is None:
        return 0, None
    start = next_line(raw.path, raw.start)
    return start, None if raw.end is None else max(start, next_line(raw.path, raw.end))


def next_line(path: Path, position: int) -> int:
    """Return the first byte of the first line at or after a position, or the end of the file."""
    if not position:
        return 0
    with reading(path), path.open("rb", buffering=0) as stream:
        # From the byte before: a line feed there means that a line begins at the position.
        stream.seek(position - 1)
        chunk_start = position - 1
        step_bytes = _FIRST_STEP
        while chunk := stream.read(step_bytes):
            if (feed := chunk.find(b"\n")) >= 0:
                return chunk_start + feed + 1
            chunk_start += len(chunk)
            step_bytes = CHUNK_BYTES
    return chunk_start


def complete_parts(
    chunks: Iterable[bytes], path: Path, *, end_mark: bytes = b"\n"
) -> Iterator[LineBytes]:
    """Yield chunks that end at the mark of a line's end. Each byte is searched only once."""
    incomplete: list[bytes] = []  # a line without its end; joined once, for lines can be long
    incomplete_bytes = 0
    for chunk in chunks:
        begin, end = 0, chunk.rfind(end_mark) + 1
        if end and incomplete:
            begin = chunk.find(end_mark) + 1
            yield b"".join([*incomplete, chunk[:begin]])
            incomplete, incomplete_bytes = [], 0
        if begin < end:
            yield memoryview(chunk)[begin:end]
        if end < len(chunk):
            incomplete.append(chunk[end:])
            incomplete_bytes += len(incomplete[-1])
        if incomplete_bytes > LONGEST_BYTES:
            raise UserError(
                f"{path}: a line is longer than {LONGEST_BYTES} bytes; "
                "is it jsonl, with line feeds as line ends?"
            )
    if incomplete:
        yield b"".join(incomplete)


def _split(chunk: LineBytes) -> list[LineBytes]:
    """Split at line feeds. Long lines become views, which takes a sixth of the time of copies."""
    content = bytes(chunk).removesuffix(b"\n")
    # Estimate the average length from the beginning of the chunk.
    if content.count(b"\n", 0, _FIRST_STEP) * _SHORT_BYTES > _FIRST_STEP:
        return list(content.split(b"\n"))
    view, lines, start = memoryview(content), [], 0
    while (end := content.find(b"\n", start)) >= 0:
        lines.append(view[start:end])
        start = end + 1
    return [*lines, view[start:]]


def _block(
    lines: list[LineBytes],
    numbers: NDArray[np.int64],
    *,
    offsets: NDArray[np.int64],
    keys: tuple[str, ...],
) -> RecordBlock:
    records = parse(lines, keys)
    if records is None:
        nonblank = [index for index, line in enumerate(lines) if not is_blank(line)]
        numbers, offsets = numbers[nonblank], offsets[nonblank]
        lines = [lines[index] for index in nonblank]
        records = parse(lines, keys) or []
    return RecordBlock(records, numbers, offsets, Lines(lines))


def is_blank(line: LineBytes) -> bool:
    """Whether a line has only white space, after a byte order mark or not."""
    return not line or not bytes(line).removeprefix(_BOM).strip()


def parse(lines: list[LineBytes], keys: tuple[str, ...]) -> list[dict[str, Any] | BadRecord] | None:
    """Return the records of all lines, or None if a line is blank.

    A file may have a blank line after each document. An exception for each would cost too much.
    """
    records: list[Any] = []
    remaining = iter(lines)
    while len(records) < len(lines):
        try:
            # At an error, `extend` keeps the records so far, and `remaining` is past the bad line.
            records.extend(map(orjson.loads, remaining))
        except orjson.JSONDecodeError as error:
            line = bytes(lines[len(records)])
            if is_blank(line):
                return None
            records.append(_parse_leniently(line.removeprefix(_BOM), error, keys=keys))
    if not set(map(type, records)) <= {dict, BadRecord}:
        records = [_require_object(record) for record in records]
    return records


def _require_object(record: Any) -> dict[str, Any] | BadRecord:
    if isinstance(record, dict | BadRecord):
        return record
    return BadRecord("not a JSON object with keys, as each line should be; fix or remove the line")


def _parse_leniently(
    line: bytes, error: orjson.JSONDecodeError, *, keys: tuple[str, ...]
) -> dict[str, Any] | BadRecord | Any:
    """Parse lines that only Python's json reads: with a byte order mark, NaN, 1e400, surrogates.

    Only a text that is read must be Unicode. NaN and Infinity become null.
    """
    with suppress(ValueError, RecursionError):
        return orjson.loads(line)
    with suppress(ValueError, RecursionError):
        value = json.loads(line.decode(), parse_int=integer, parse_constant=lambda _: None)
        return with_unicode(value, keys)
    return BadRecord(_reason(line, error))


def _reason(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as decode_error:
        fault = utf8_fault(decode_error, " of the line")
        return f"{fault}; convert the file to UTF-8, or fix or remove the line"
    where = f"{error.msg} at character {error.pos}"
    if "depth" in error.msg or "ecursion" in error.msg:
        return f"nested too deep ({where}); fix or remove the line"
    if "content after" in error.msg and b"\r" in line.rstrip():
        return "lone CR as line end; turn it into a line feed: tr '\\r' '\\n'"
    if "content after" in error.msg:
        return f"more than one JSON value in a line ({where}); give each a line: jq -c ."
    return f"not valid JSON ({where}); fix or remove the line"
