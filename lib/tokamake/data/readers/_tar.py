"""Members of a tar archive with ustar, GNU or pax headers, read as a stream.

`tarfile` parses single headers only: its reader of archives takes a damaged header for the end, and
reads as many bytes into memory as a header states.
"""

import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from tokamake.data.readers._input import CHUNK_BYTES

_BLOCK = 512
_HEADER_BYTES = 1 << 20
"""Maximum bytes of long names and fields that belong to one member."""
_FIELDS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class TarMember(NamedTuple):
    """A member that is not a folder."""

    name: str
    is_file: bool
    """Not a link, a device or a sparse file."""
    content: Iterator[bytes]


class TarStream:
    def __init__(self, chunks: Iterator[bytes], max_bytes: int) -> None:
        self._chunks, self._rest, self._max_bytes = chunks, b"", max_bytes
        self._position = 0
        self._global_fields: dict[bytes, bytes] = {}

    def members(self) -> Iterator[TarMember]:
        """Yield the members in order."""
        while header := self._header():
            name, info, is_sparse = header
            has_content = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
            content = self._content(info.size if has_content else 0)
            if not info.isdir():
                yield TarMember(name, info.isreg() and not is_sparse, content)
            for _ in content:  # the rest, which the caller did not read
                pass
        end = self._position
        while chunk := self._next(CHUNK_BYTES):
            if chunk.strip(b"\0"):
                raise tarfile.ReadError(
                    f"its members end at byte {end:,}, which is not the end of the archive"
                )

    def _header(self) -> tuple[str, tarfile.TarInfo, bool] | None:
        """Return the next member's name and header, and whether it is sparse; None at the end."""
        start, bytes_left = self._position, _HEADER_BYTES
        fields: dict[bytes, bytes] = {}
        while True:
            block = b"".join(self._content(_BLOCK))
            if not block.strip(b"\0") and self._position == start + _BLOCK:
                return None
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if info.type not in _FIELDS + _LONG_NAMES:
                break
            bytes_left -= max(info.size, _BLOCK)
            if info.size < 0 or bytes_left < 0:
                raise tarfile.ReadError(
                    f"the header at byte {start:,} states a name or fields of {info.size:,} bytes, "
                    f"more than {_HEADER_BYTES:,}"
                )
            data = b"".join(self._content(info.size))
            if info.type == tarfile.XGLTYPE:
                self._global_fields |= _fields(data, start)
            elif info.type in _FIELDS:
                fields |= _fields(data, start)
            elif info.type == tarfile.GNUTYPE_LONGNAME:
                fields[b"path"] = data.partition(b"\0")[0]
        fields = self._global_fields | fields
        name = fields[b"path"].decode(errors="surrogateescape") if b"path" in fields else info.name
        info.size = int(fields.get(b"size", info.size))
        if not 0 <= info.size <= self._max_bytes:
            fault = f"the header of {name[:200]} at byte {start:,} states {info.size:,} bytes"
            raise tarfile.ReadError(fault)
        return name, info, b"GNU.sparse" in fields or info.type == tarfile.GNUTYPE_SPARSE

    def _content(self, size: int) -> Iterator[bytes]:
        padding = -size % _BLOCK
        while size:
            if not (piece := self._next(size)):
                raise tarfile.ReadError(f"it ends early, at byte {self._position:,}")
            size -= len(piece)
            yield piece
        while padding and (piece := self._next(padding)):
            padding -= len(piece)

    def _next(self, count: int) -> bytes:
        """Return at most `count` bytes; none only at the end."""
        chunk = self._rest or next(self._chunks, b"")
        self._rest = chunk[count:]
        self._position += min(count, len(chunk))
        return chunk[:count]


def _fields(data: bytes, start: int) -> dict[bytes, bytes]:
    """Return the fields of a pax header that change a member: its path, size and sparseness."""
    fields, position = {}, 0
    while position < len(data):
        digits = data[position : position + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = data[position + len(digits) + 1 : position + length]
        key, _, value = record.partition(b"=")
        key = b"GNU.sparse" if key.startswith(b"GNU.sparse") else key
        if value[-1:] != b"\n" or (
            key == b"size" and not (len(value) <= 21 and value[:-1].isdigit())
        ):
            raise tarfile.ReadError(f"the fields of the header at byte {start:,} are damaged")
        if key in (b"path", b"size", b"GNU.sparse"):
            fields[key] = value[:-1]
        position += length
    return fields
