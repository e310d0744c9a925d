"""Reads jsonl, plain or compressed: one JSON object a line, blank lines skipped."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import orjson

from tokamake.data.readers._compression import BAD_STREAM, compression, open_raw
from tokamake.errors import UserError


def accepts(head: bytes, path: Path) -> bool:
    """Take compressed files, and plain ones that begin like JSON or are named so."""
    opening = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    return compression(head) is not None or opening in (b"{", b"") or path.suffix == ".jsonl"


def read(path: Path, text_key: str, byte_range: tuple[int, int | None] | None) -> Iterator[str]:
    """Yield the text of each line; see `tokamake.data.readers.read`."""
    with path.open("rb") as stream:
        head = stream.read(16)
    if byte_range and compression(head):
        raise UserError(f"{path}: a compressed file has no byte ranges; read it whole")
    start, end = byte_range or (0, None)
    with open_raw(path, head) as lines:
        for where, line in _lines(lines, path, start, end):
            if line.strip():
                yield _text(line, text_key, where)


def _lines(
    stream: IO[bytes], path: Path, start: int, end: int | None
) -> Iterator[tuple[str, bytes]]:
    """Lines whose first byte lies in [start, end), each with its place for error messages."""
    position = 0
    if start:
        # The line that holds the byte before `start` belongs to the range before this one.
        stream.seek(start - 1)
        position = start - 1 + len(stream.readline())
    number = 0
    try:
        while end is None or position < end:
            line = stream.readline()
            if not line:
                return
            number += 1
            yield f"{path}: byte {position}" if start else f"{path}:{number}", line
            position += len(line)
    except BAD_STREAM as error:
        raise UserError(
            f"{path}:{number + 1}: cannot be decompressed ({error}); fetch the file again"
        ) from None


def _text(line: bytes, text_key: str, where: str) -> str:
    try:
        document = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}); mend or remove the line") from None
    if not isinstance(document, dict) or text_key not in document:
        raise UserError(f'{where}: no key "{text_key}"; fix text_key or the line')
    text = document[text_key]
    if not isinstance(text, str):
        raise UserError(
            f'{where}: "{text_key}" holds {type(text).__name__}, not text; fix text_key or the line'
        )
    return text
