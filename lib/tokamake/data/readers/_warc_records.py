"""Records of a WARC file (ISO 28500) in order, with strict checks of their lengths.

fastwarc returns a record that the end of the file cuts as if it were whole, and takes a
Content-Length that is no number for 0.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tokamake.errors import UserError

BEGINNING = b"WARC/"
_HEADER_BYTES = 1 << 16
"""Maximum size of a record's header."""
_END = b"\r\n\r\n"
"""End of a header, and of a record."""


class WarcRecord(NamedTuple):
    offset: int
    """First byte in the decompressed file."""
    header: bytes
    """Lines of the header, with the blank line that ends it."""
    fields: dict[str, str]
    """Fields of the header by their names in lower case."""
    content: bytes | None
    """None if it is longer than the limit of its type."""

    @property
    def type(self) -> str:
        return self.fields.get("warc-type", "").lower()


class WarcRecords:
    def __init__(self, chunks: Iterator[bytes], path: Path, *, limits: Mapping[str, int]) -> None:
        """Prepare to read.

        Args:
            limits: record type → maximum bytes of a content; contents of other types are skipped.
        """
        self._stream, self._path, self._limits = _Stream(chunks), path, limits

    def __iter__(self) -> Iterator[WarcRecord]:
        """Yield the records; UserError at the first damaged one."""
        while self._stream.fill(1):
            offset = self._stream.position
            header = self._header(offset)
            fields = _fields(header)
            length = fields.get("content-length", "nothing")
            if not (length.isascii() and length.isdigit() and len(length) < 19):
                raise self._damaged(offset, f"states {length[:40]} as its Content-Length")
            content = self._content(int(length), fields, offset=offset)
            if (end := self._stream.take(len(_END))) != _END:
                if len(end) < len(_END):
                    raise self._cut(offset)
                raise self._damaged(offset, f"does not end after its Content-Length {length}")
            yield WarcRecord(offset, header, fields, content)

    def _header(self, offset: int) -> bytes:
        size = self._stream.find(_END, _HEADER_BYTES) + len(_END)
        if not self._stream.fill(size) or not self._stream.starts_with(BEGINNING):
            if self._stream.starts_with(BEGINNING):
                raise self._cut(offset)
            raise self._damaged(offset, "does not begin with WARC/")
        if size > _HEADER_BYTES:
            raise self._damaged(offset, f"has a header of more than {_HEADER_BYTES:,} bytes")
        return self._stream.take(size)

    def _content(self, length: int, fields: Mapping[str, str], *, offset: int) -> bytes | None:
        limit = self._limits.get(fields.get("warc-type", "").lower(), -1)
        if length <= limit:
            content = self._stream.take(length)
            is_whole = len(content) == length
        else:
            content, is_whole = None, self._stream.skip(length)
        if not is_whole:
            raise self._cut(offset)
        return content

    def _cut(self, offset: int) -> UserError:
        return self._damaged(offset, f"is cut by the end of the file at byte {self._stream.end:,}")

    def _damaged(self, offset: int, fault: str) -> UserError:
        return UserError(
            f"{self._path}: the record at byte {offset:,} of the decompressed content {fault}; "
            "fetch the file again: the lost documents cannot be counted"
        )


def _fields(header: bytes) -> dict[str, str]:
    """Parse the fields of a header; a line that begins with white space continues a value."""
    fields: dict[str, str] = {}
    name = ""
    for line in header.decode(errors="replace").split("\r\n")[1:]:
        if line[:1] in (" ", "\t"):
            fields[name] = f"{fields.get(name, '')} {line.strip()}"
        elif line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    return fields


class _Stream:
    """Bytes of chunks, taken in other pieces."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer, self._start = b"", 0
        self.position = 0
        """Number of bytes taken."""

    @property
    def end(self) -> int:
        """Number of bytes that the chunks had so far."""
        return self.position + len(self._buffer) - self._start

    def fill(self, size: int) -> bool:
        """Read until `size` bytes can be taken; False if the chunks end before."""
        num_bytes = len(self._buffer) - self._start
        if num_bytes >= size:
            return True
        parts = [self._buffer[self._start :]]
        while num_bytes < size and (chunk := next(self._chunks, b"")):
            parts.append(chunk)
            num_bytes += len(chunk)
        self._buffer, self._start = b"".join(parts), 0
        return num_bytes >= size

    def find(self, mark: bytes, limit: int) -> int:
        """Return the number of bytes before a mark; `limit` if it is not among the next bytes."""
        self.fill(len(mark))
        found = self._buffer.find(mark, self._start, self._start + limit)
        if found < 0:
            self.fill(limit)
            found = self._buffer.find(mark, self._start, self._start + limit)
        return limit if found < 0 else found - self._start

    def starts_with(self, mark: bytes) -> bool:
        return self._buffer.startswith(mark, self._start)

    def take(self, size: int) -> bytes:
        """Return the next bytes; fewer than `size` only at the end."""
        self.fill(size)
        data = self._buffer[self._start : self._start + size]
        self._start += len(data)
        self.position += len(data)
        return data

    def skip(self, size: int) -> bool:
        """Drop bytes without keeping them in memory; False if the chunks end before."""
        while size and (piece := self.take(min(size, max(1, len(self._buffer) - self._start)))):
            size -= len(piece)
        return not size
