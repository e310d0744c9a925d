"""Where byte ranges of a Wikipedia dump can be cut: before a page.

In an XML file, that is any <page>. A bz2 file is cut at the streams that begin with a page: a
multistream dump has one for each hundred pages. The text of pages has no "<", which XML escapes.
"""

import bz2
import re
from collections.abc import Iterator
from pathlib import Path

from tokamake.data.readers._input import CHUNK_BYTES, reading

_PAGE = b"<page>"
_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
"""Header of a bz2 stream and magic of its first block."""
_LONGEST_MARK = 10
_BLOCK_BYTES = 1 << 20
"""A block of a bz2 stream is shorter. The first one tells whether the stream begins with a page."""


def next_page(path: Path, position: int, *, compression: str) -> int:
    """Return the first cut at or after a position, or the end of the file; the first cut is 0."""
    if not position:
        return 0
    for cut in cuts(path, position, compression=compression):
        return cut
    return path.stat().st_size


def cuts(
    path: Path, start: int, *, compression: str, max_bytes: int | None = None
) -> Iterator[int]:
    """Yield the cuts from `start` on, in up to `max_bytes` of the file."""
    pattern = _STREAM if compression else re.compile(_PAGE)
    for position in _positions(path, start, pattern=pattern, max_bytes=max_bytes):
        if not compression or _begins_with_page(path, position):
            yield position


def _positions(
    path: Path, start: int, *, pattern: re.Pattern[bytes], max_bytes: int | None
) -> Iterator[int]:
    with reading(path), path.open("rb", buffering=0) as stream:
        stream.seek(start)
        kept, kept_start = b"", start
        while chunk := stream.read(CHUNK_BYTES):
            data = kept + chunk
            yield from (kept_start + match.start() for match in pattern.finditer(data))
            # A mark that the chunk cuts is found with the next one.
            kept = data[-(_LONGEST_MARK - 1) :]
            if match := pattern.search(kept):
                kept = kept[match.end() :]
            kept_start += len(data) - len(kept)
            if max_bytes is not None and kept_start - start >= max_bytes:
                return


def _begins_with_page(path: Path, position: int) -> bool:
    with reading(path), path.open("rb", buffering=0) as stream:
        stream.seek(position)
        data = stream.read(_BLOCK_BYTES)
    try:
        return bz2.BZ2Decompressor().decompress(data, 4096).lstrip().startswith(_PAGE)
    except OSError:  # the mark was part of compressed data, or the stream is damaged
        return False
