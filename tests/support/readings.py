"""Raw lines, their compression, and functions that read raw files, also in tiny steps."""

import bz2
import gzip
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from backports import zstd

from tokamake.data.readers import BadRecord, Input, _compression, _input, jsonl, open_input

TEXTS = ["one", "zwei\nlines", "üç 😀", "", "five", "\u2028 \u2029 \x85 \0 \x0b", "\r\n"]
LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def checked(data: bytes) -> bytes:
    """Compress to one zstd frame with a checksum, as the `zstd` command writes it."""
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})


PACK = {"gz": gzip.compress, "zst": checked, "xz": lzma.compress, "bz2": bz2.compress}


def records(raw: Input, *keys: str) -> list[Any]:
    return [record for block in raw.blocks(keys or ("text",)) for record in block.records]


def read(path: Path, **options: Any) -> list[Any]:
    return [
        record if isinstance(record, BadRecord) else record["text"]
        for record in records(open_input(path, **options))
    ]


@contextmanager
def small_steps(size: int) -> Iterator[None]:
    """Read and unpack a few bytes at once, so that lines and members cross chunk borders."""
    with (
        patch.object(_input, "CHUNK_BYTES", size),
        patch.object(jsonl, "CHUNK_BYTES", size),
        patch.object(jsonl, "_FIRST_STEP", size),
        patch.object(jsonl, "_MAX_LINES", 3),
        patch.object(_compression, "_INPUT_BYTES", size),
        patch.object(_compression, "_OUTPUT_BYTES", size),
    ):
        yield
