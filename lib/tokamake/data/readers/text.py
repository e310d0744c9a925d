"""Reader of plain text, compressed or not. A file is one document."""

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokamake.data.readers._detect import content_suffix
from tokamake.data.readers._input import Input
from tokamake.data.readers._records import (
    LONGEST_BYTES,
    BadRecord,
    RecordBlock,
    read_all,
    utf8_fault,
)
from tokamake.errors import UserError

UNIT = "line"
HAS_MAGIC = False
HAS_BYTE_RANGES = False
IS_ONE_DOCUMENT = True

NAMES = {".txt", ".text", ".md", ".rst", ".tex"}
"""Suffixes of plain text. Content alone cannot identify it."""


def accepts(head: bytes, path: Path) -> bool:
    """Accept names of plain text. Earlier readers accept archives and jsonl so named."""
    return content_suffix(path) in NAMES


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the file as the text of a single key. An empty file is an empty document."""
    if len(keys) != 1:
        raise UserError(
            f"{raw.path}: a text file holds one text, not {', '.join(keys)}; give one text_key"
        )
    if (data := read_all(raw.chunks(), LONGEST_BYTES)) is None:
        raise UserError(f"{raw.path}: longer than {LONGEST_BYTES} bytes for one document; split it")
    records: list[dict[str, Any] | BadRecord] = [_record(data, keys[0])]
    start = -1 if raw.compression else 0
    yield RecordBlock(records, np.array([1], np.int64), np.array([start], np.int64), [data])


def _record(data: bytes, key: str) -> dict[str, Any] | BadRecord:
    try:
        return {key: data.removeprefix(BOM_UTF8).decode()}
    except UnicodeDecodeError as error:
        remedy = "convert it: iconv -f LATIN1 -t UTF-8, or from its encoding"
        return BadRecord(f"{utf8_fault(error)}; {remedy}")
