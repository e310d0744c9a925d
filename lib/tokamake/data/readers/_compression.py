"""Unpacks compressed files, told from their first bytes: members, frames or streams in a row.

Python's own file objects overlook some kinds of trailing garbage; here whatever follows the last
whole member is an error, and output comes in bounded pieces, so that no file can fill the memory.
"""

import bz2
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokamake.errors import UserError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SUFFIXES = {".gz", ".zst", ".xz", ".bz2"}
"""Ends of the names of compressed files."""

_MAGIC = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst", b"\xfd7zXZ\0": "xz", b"BZh": "bz2"}
_SKIPPABLE = {bytes([0x50 + low, 0x2A, 0x4D, 0x18]): "zst" for low in range(16)}  # RFC 8878, 3.1.2
_PIECE_BYTES = 1 << 16  # of input at once: what follows a member is copied when the member ends
_OUTPUT_BYTES = 1 << 20


class _Gunzip:
    """zlib's object with the interface of lzma.LZMADecompressor, which the others have."""

    def __init__(self) -> None:
        self._object = zlib.decompressobj(wbits=31)  # checks the sum and length of each member

    @property
    def eof(self) -> bool:
        """Whether the member has ended."""
        return self._object.eof

    @property
    def unused_data(self) -> bytes:
        """Input after the end of the member."""
        return self._object.unused_data

    @property
    def needs_input(self) -> bool:
        """Whether all input so far has been used."""
        return not self._object.unconsumed_tail

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """At most `max_length` bytes of output."""
        return self._object.decompress(self._object.unconsumed_tail + data, max_length)


def _unzstd() -> Any:
    # Text archives made with `zstd --long=31` need the largest window; the default stops at 27.
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 31})


_NEW: dict[str, Callable[[], Any]] = {
    "gz": _Gunzip,
    "zst": _unzstd,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    "bz2": bz2.BZ2Decompressor,
}


def compression(head: bytes) -> str:
    """Name of the compression that a file with these first bytes has, or an empty string."""
    magics = _MAGIC | _SKIPPABLE
    return next((name for magic, name in magics.items() if head.startswith(magic)), "")


def unpack(chunks: Iterable[bytes], name: str, path: Path, *, block_bytes: int) -> Iterator[bytes]:
    """Decompressed bytes of all members, in blocks of about `block_bytes`.

    Raises:
        UserError: the file is cut off or damaged, or something else follows its last member.
    """
    ready: list[bytes] = []
    size = 0
    for piece in _Members(name, path).unpack(chunks):
        ready.append(piece)
        size += len(piece)
        if size >= block_bytes:
            yield b"".join(ready)
            ready, size = [], 0
    if ready:
        yield b"".join(ready)


class _Members:
    """State of unpacking one file."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.position = 0  # in the compressed file, of the piece at hand
        self.whole = 0  # members that have ended
        self.padding = 0  # zero bytes since the last one
        self.begun = False  # the member at hand has given output

    def unpack(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Decompressed pieces of all members."""
        member = None
        for data in _pieces(chunks):
            length = len(data)
            while data or (member and not member.needs_input):
                if member is None:
                    data = self._skip_padding(data)
                    if not data:
                        break
                    member = _NEW[self.name]()
                out = self._decompress(member, data)
                data = b""
                if out:
                    yield out
                if member.eof:
                    data, member = member.unused_data, None
                    self.whole += 1
            self.position += length
        if member or self._odd_padding():
            raise self._error("is cut off")

    def _skip_padding(self, data: bytes) -> bytes:
        """Drop the zero bytes that xz (a multiple of 4) and gz allow after a member."""
        if self.whole and self.name in ("gz", "xz"):
            rest = data.lstrip(b"\0")
            self.padding += len(data) - len(rest)
            data = rest
        if data and self._odd_padding():
            raise self._error("is damaged")
        if data:
            self.padding, self.begun = 0, False
        return data

    def _odd_padding(self) -> bool:
        return self.name == "xz" and self.padding % 4 != 0

    def _decompress(self, member: Any, data: bytes) -> bytes:
        try:
            out: bytes = member.decompress(data, _OUTPUT_BYTES)
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
            raise self._error(f"is damaged ({error})") from None
        self.begun = self.begun or bool(out)
        return out

    def _error(self, what: str) -> UserError:
        if self.whole and not self.begun:
            what += f" or has something else after the end of its {self.name} data"
        return UserError(
            f"{self.path}: {self.name} data {what}, near byte {self.position} of the compressed "
            "file; fetch it again: what is lost cannot be counted"
        )


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        for start in range(0, len(chunk), _PIECE_BYTES):
            yield chunk[start : start + _PIECE_BYTES]
