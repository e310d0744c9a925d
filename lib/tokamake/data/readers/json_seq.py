"""Reader of JSON text sequences (RFC 7464), as `jq --seq` writes them.

A record separator, byte 0x1e, precedes each value, which may span lines.
"""

from collections.abc import Iterator
from pathlib import Path

from tokamake.data.readers._input import Input
from tokamake.data.readers._records import Lines, RecordBlock, row_block
from tokamake.data.readers.jsonl import complete_parts, is_blank, parse

UNIT = "row"
HAS_MAGIC = True
HAS_BYTE_RANGES = False

_SEPARATOR = b"\x1e"


def accepts(head: bytes, path: Path) -> bool:
    return head.startswith(_SEPARATOR)


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    first_row = 0
    for chunk in complete_parts(raw.chunks(), raw.path, end_mark=_SEPARATOR):
        parts = [part for part in bytes(chunk).split(_SEPARATOR) if not is_blank(part)]
        if records := parse([*parts], keys):
            yield row_block(records, first_row)._replace(raw=Lines(parts))
            first_row += len(records)
