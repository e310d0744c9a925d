"""Reader of HTML pages, compressed or not. A file is one document: the main text of its page."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokamake.data.readers._detect import content_suffix, first_line, parse_json_line
from tokamake.data.readers._extractor import LONGEST_PAGE_BYTES, WebPage, open_extractor
from tokamake.data.readers._input import Input
from tokamake.data.readers._records import BadRecord, RecordBlock, read_all
from tokamake.errors import UserError

UNIT = "line"
HAS_MAGIC = False
HAS_BYTE_RANGES = False
IS_ONE_DOCUMENT = True
READS_ALL_ENCODINGS = True
SETTINGS = {"extractor": ("resiliparse", "trafilatura")}

_NAMES = {".html", ".htm", ".xhtml"}


def accepts(head: bytes, path: Path) -> bool:
    """Accept names of pages, but for JSON Lines so named."""
    return content_suffix(path) in _NAMES and parse_json_line(first_line(head)[0]) is None


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the text of the page under a single key."""
    if len(keys) != 1:
        raise UserError(
            f"{raw.path}: an HTML page holds one text, not {', '.join(keys)}; give one text_key"
        )
    chunks = iter(raw.chunks())
    data = read_all(chunks, LONGEST_PAGE_BYTES)
    if data is None:
        for _ in chunks:  # the manifest has the hash of the whole file
            pass
    record = _record(raw, data, keys[0])
    start = -1 if raw.compression else 0
    yield RecordBlock([record], np.array([1], np.int64), np.array([start], np.int64), [data or b""])


def _record(raw: Input, data: bytes | None, key: str) -> dict[str, str] | BadRecord:
    """The text of a page; None is a page that is too long."""
    if data is None:
        return BadRecord(f"longer than {LONGEST_PAGE_BYTES:,} bytes; leave it out")
    (text,) = open_extractor(raw.settings["extractor"], raw.workers).texts([WebPage(data)])
    return text if isinstance(text, BadRecord) else {key: text}
