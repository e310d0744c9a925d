"""Decompression of raw files: detects the compression and unpacks all members, frames or streams.

Python's own file objects ignore some kinds of trailing garbage. Here any data after the last
complete member is an error. Output comes in bounded blocks, so that no file can exhaust memory.
"""

import bz2
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokamake.errors import UserError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SUFFIXES = {".gz", ".zst", ".xz", ".bz2", ".lzma"}

_MAGIC = {
    b"\x1f\x8b": "gz",
    b"\x28\xb5\x2f\xfd": "zst",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bz2",
    b"\x5d\0\0": "lzma",  # usual properties, and the low bytes of the size of the dictionary
}
# A zstd file may begin with a skippable frame (RFC 8878, section 3.1.2).
_SKIPPABLE = {bytes([0x50 + low, 0x2A, 0x4D, 0x18]): "zst" for low in range(16)}
# A decompressor copies its unused input when a member ends. Small inputs keep that copy cheap.
_INPUT_BYTES = 1 << 16
_XZ_BYTES = 1 << 28  # `xz -9` needs a quarter of it; the format permits dictionaries of 1.5 GB
_OUTPUT_BYTES = 1 << 20  # limit of one decompress call; a member can expand a thousandfold


class _GzipDecompressor:
    """zlib decompressor with the interface of lzma.LZMADecompressor."""

    def __init__(self) -> None:
        # 31 = 16 (gzip header and trailer, so zlib checks checksum and length) + 15 (window bits).
        self._decompressor = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._decompressor.eof

    @property
    def unused_data(self) -> bytes:
        return self._decompressor.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._decompressor.unconsumed_tail

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._decompressor.decompress(self._decompressor.unconsumed_tail + data, max_length)


def _zstd_decompressor() -> Any:
    # Text archives made with `zstd --long=31` need the largest window; the default limit is 27.
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 31})


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": _GzipDecompressor,
    "zst": _zstd_decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_BYTES),
    "lzma": lambda: lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_XZ_BYTES),
    "bz2": bz2.BZ2Decompressor,
}


def compression(head: bytes) -> str:
    """Return the compression of a file with these first bytes, or an empty string."""
    magics = _MAGIC | _SKIPPABLE
    return next((name for magic, name in magics.items() if head.startswith(magic)), "")


def unpack(chunks: Iterable[bytes], name: str, *, path: Path, block_bytes: int) -> Iterator[bytes]:
    """Yield the decompressed bytes of all members in blocks of about `block_bytes`."""
    outputs: list[bytes] = []
    size = 0
    for output in _Unpacker(name, path).unpack(chunks):
        outputs.append(output)
        size += len(output)
        if size >= block_bytes:
            yield b"".join(outputs)
            outputs, size = [], 0
    if outputs:
        yield b"".join(outputs)


def unpack_members(
    chunks: Iterable[bytes], name: str, *, path: Path, first_byte: int
) -> Iterator[tuple[int, bytes]]:
    """Yield decompressed bytes, with the first byte in the file of the member that holds them.

    `first_byte` is the position of the chunks in the file.
    """
    unpacker = _Unpacker(name, path, first_byte=first_byte)
    for output in unpacker.unpack(chunks):
        yield unpacker.member_start, output


def beginning(data: bytes, name: str, *, path: Path) -> bytes:
    """Decompressed bytes of the beginning of a file, as far as it is complete."""
    outputs: list[bytes] = []
    with suppress(UserError):  # it ends within a member
        outputs.extend(_Unpacker(name, path).unpack([data]))
    return b"".join(outputs)


class _Unpacker:
    def __init__(self, name: str, path: Path, *, first_byte: int = 0) -> None:
        self.name, self.path = name, path
        self.position = first_byte  # of the current input in the compressed file
        self.member_start = first_byte
        self.num_complete = 0  # members that have ended
        self.padding_bytes = 0  # zero bytes since the last member
        self.has_output = False  # whether the current member has given output

    def unpack(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the output of all members."""
        member = None
        for data in _small_inputs(chunks):
            input_bytes = len(data)
            # A member can hold back output beyond _OUTPUT_BYTES: call it again without input.
            while data or (member and not member.needs_input):
                if member is None:
                    data = self._skip_padding(data)
                    if not data:
                        break
                    member = _DECOMPRESSORS[self.name]()
                    self.member_start = self.position + input_bytes - len(data)
                output = self._decompress(member, data)
                data = b""
                if output:
                    yield output
                if member.eof:
                    data, member = member.unused_data, None
                    self.num_complete += 1
            self.position += input_bytes
        if member or self._has_invalid_padding():
            raise self._error("is truncated")

    def _skip_padding(self, data: bytes) -> bytes:
        """Drop zero bytes after a member: gz allows any number of them, xz a multiple of 4."""
        if self.num_complete and self.name in ("gz", "xz"):
            stripped = data.lstrip(b"\0")
            self.padding_bytes += len(data) - len(stripped)
            data = stripped
        if data and self._has_invalid_padding():
            raise self._error("is damaged")
        if data:
            self.padding_bytes, self.has_output = 0, False
        return data

    def _has_invalid_padding(self) -> bool:
        return self.name == "xz" and self.padding_bytes % 4 != 0

    def _decompress(self, member: Any, data: bytes) -> bytes:
        try:
            output: bytes = member.decompress(data, _OUTPUT_BYTES)
        except MemoryError:
            raise self._too_large() from None
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
            if any(fault in str(error) for fault in ("Memory usage limit", "Allocation error")):
                raise self._too_large() from None
            raise self._error(f"is damaged ({error})") from None
        self.has_output = self.has_output or bool(output)
        return output

    def _too_large(self) -> UserError:
        return UserError(
            f"{self.path}: its {self.name} data need too much memory for a dictionary or window; "
            "compress it again with a usual level"
        )

    def _error(self, fault: str) -> UserError:
        # A fault before a later member's first output may just as well be trailing garbage.
        if self.num_complete and not self.has_output:
            fault += f" or other data follows the end of its {self.name} data"
        return UserError(
            f"{self.path}: {self.name} data {fault}, near byte {self.position} of the compressed "
            "file; fetch it again: the lost documents cannot be counted"
        )


def _small_inputs(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        for start in range(0, len(chunk), _INPUT_BYTES):
            yield chunk[start : start + _INPUT_BYTES]
