"""Rows about the documents of many shards in one file: hashes, or ordinals of exact duplicates.

`hash_documents` writes a file of hashes for each batch of shards; `find_duplicates` compares those
of a corpus and writes one file of ordinals, from which `tokenize` reads each shard's. A file holds
all rows, little-endian, then a JSON table [[shard, rows], ...], its size as u64, and a magic.
"""

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from tokamake.errors import UserError

_FOOT = struct.Struct("<Q8s")
_MAGIC = b"TKMROWS\1"

HASH = np.dtype("<u8")
"""A hash has 128 bits, two of these."""
ORDINAL = np.dtype("<i8")
"""Number of a document in its shard, from 0, bad ones counted."""


class RowsWriter:
    """Writes rows shard by shard; memory does not grow with them."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._table: list[tuple[str, int]] = []

    def add(self, shard: str, rows: npt.NDArray) -> None:
        """Append rows of a shard; those of one shard follow one another."""
        if not self._table or self._table[-1][0] != shard:
            self._table.append((shard, 0))
        self._table[-1] = shard, self._table[-1][1] + len(rows)
        self._stream.write(np.ascontiguousarray(rows).data)

    def __enter__(self) -> "RowsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            table = orjson.dumps(self._table)
            self._stream.write(table + _FOOT.pack(len(table), _MAGIC))
        self._stream.close()


def read_table(path: Path) -> list[tuple[str, int]]:
    """Shards of a file and the number of their rows, in order.

    Raises:
        UserError: the file is missing or not such a file.
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(size - _FOOT.size, 0))
            length, magic = _FOOT.unpack(stream.read(_FOOT.size))
            stream.seek(size - _FOOT.size - length)
            table = orjson.loads(stream.read(length))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the workflow again") from None
    except (OSError, ValueError, struct.error):
        magic = b""
    if magic != _MAGIC:
        raise UserError(f"{path}: not a file of rows; remove it and run the workflow again")
    return [(shard, rows) for shard, rows in table]


def read_rows(path: Path, dtype: np.dtype, width: int = 1) -> npt.NDArray:
    """All rows of a file, (rows, width), memory-mapped."""
    count = sum(rows for _, rows in read_table(path))
    if not count:
        return np.zeros((0, width), dtype)
    return np.memmap(path, dtype, "r", shape=(count, width))


def read_duplicates(path: Path, shard: str) -> npt.NDArray[np.int64]:
    """Ordinals of the documents that a shard should leave out, ascending.

    Raises:
        UserError: the file is missing, or does not know the shard.
    """
    first = 0
    for name, rows in read_table(path):
        if name == shard:
            return np.array(read_rows(path, ORDINAL)[first : first + rows, 0])
        first += rows
    raise UserError(f"{path}: does not know shard {shard}; run the workflow again")
