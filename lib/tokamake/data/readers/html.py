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
    data = read_all(raw.chunks(), LONGEST_PAGE_BYTES)
    if data is None:
        raise UserError(f"{raw.path}: longer than {LONGEST_PAGE_BYTES:,} bytes; leave it out")
    (text,) = open_extractor(raw.settings["extractor"], raw.workers).texts([WebPage(data)])
    record = text if isinstance(text, BadRecord) else {keys[0]: text}
    start = -1 if raw.compression else 0
    yield RecordBlock([record], np.array([1], np.int64), np.array([start], np.int64), [data])
