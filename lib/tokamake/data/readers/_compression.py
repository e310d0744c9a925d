"""Opens a file for reading whatever it is compressed with, told from its first bytes."""

import bz2
import gzip
import lzma
import sys
import zlib
from pathlib import Path
from typing import IO, cast

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_MAGIC = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst", b"\xfd7zXZ\0": "xz", b"BZh": "bz2"}

# The zstandard package's reader ends silently where a file was cut off; zstd.open raises, as gzip.
BAD_STREAM = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
"""What the streams of `open_raw` raise for damaged files."""

EXPANSION = {".gz": 3.5, ".zst": 4.0, ".xz": 5.0, ".bz2": 4.5, ".parquet": 3.0}
"""Bytes of jsonl per compressed byte of text, roughly: what `plan` reckons with."""


def compression(head: bytes) -> str | None:
    """Name of the compression that a file with these first bytes has, or None."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def open_raw(path: Path, head: bytes) -> IO[bytes]:
    """Open a file as a stream of decompressed bytes (all members or frames)."""
    match compression(head):
        case "gz":
            return cast(IO[bytes], gzip.open(path, "rb"))
        case "zst":
            return cast(IO[bytes], zstd.open(path, "rb"))
        case "xz":
            return lzma.open(path, "rb")
        case "bz2":
            return bz2.open(path, "rb")
    return path.open("rb")
