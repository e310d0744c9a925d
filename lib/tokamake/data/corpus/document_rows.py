"""Files with rows for the documents of many shards: hashes, ordinals of duplicates, or passages.

`hash_documents` writes a file of hashes per job batch; `find_duplicates` compares a corpus's hashes
and writes a file of ordinals; `tokenize` reads it. Format: all rows, little-endian; JSON with the
table [[shard, rows], ...] and a CRC-32 of the rows and the table (in earlier versions the table
alone); the size of the JSON as u64; a magic. With the table at the end, the rows can be written as
they come. The JSON of near-duplicates has "kind": "near".
"""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from isal import isal_zlib

from tokamake.errors import UserError

_FOOTER = struct.Struct("<Q8s")
_MAGIC = b"TKMROWS\1"
NEAR = "near"
"""Kind of a file of near-duplicates."""

HASH = np.dtype("<u8")
"""Half of a hash, which has 128 bits."""
ORDINAL = np.dtype("<i8")
"""Index of a document in its shard, from 0; bad documents count."""


class RowsWriter:
    """Writes rows shard by shard; memory does not grow with their number."""

    def __init__(self, path: Path, kind: str = "") -> None:
        self._stream = path.open("wb")
        self._kind = kind
        self._table: list[tuple[str, int]] = []
        self._crc = 0

    def add(self, shard: str, rows: npt.NDArray) -> None:
        """Append rows of a shard; all rows of a shard must come before the next shard."""
        if not self._table or self._table[-1][0] != shard:
            self._table.append((shard, 0))
        self._table[-1] = shard, self._table[-1][1] + len(rows)
        content = np.ascontiguousarray(rows).data
        self._crc = isal_zlib.crc32(content, self._crc)
        self._stream.write(content)

    def __enter__(self) -> "RowsWriter":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if error_type is None:
            content = {"table": self._table, **({"kind": self._kind} if self._kind else {})}
            table = orjson.dumps({**content, "crc32": _footer_crc(content, self._crc)})
            self._stream.write(table + _FOOTER.pack(len(table), _MAGIC))
        self._stream.close()


def _footer_crc(content: Mapping[str, Any], crc: int) -> int:
    """CRC-32 of the rows, the table, and the kind if there is one."""
    crc = isal_zlib.crc32(orjson.dumps(content["table"]), crc)
    return isal_zlib.crc32(content.get("kind", "").encode(), crc)


def read_table(path: Path, *, verify: bool = False) -> list[tuple[str, int]]:
    """Return the shards of a file and their numbers of rows, in order; `verify` reads all bytes."""
    return [(shard, rows) for shard, rows in _read_footer(path, verify=verify)["table"]]


def checksum(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of the rows and the table of a file; 0: an earlier version wrote it."""
    return path.stat().st_size, _read_footer(path, verify=False).get("crc32", 0)


def has_near_duplicates(path: Path) -> bool:
    """Whether a file lists documents that are nearly equal to others, not equal."""
    return _read_footer(path, verify=False).get("kind") == NEAR


def _read_footer(path: Path, *, verify: bool) -> dict[str, Any]:
    """Table and kind of a file."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(size - _FOOTER.size, 0))
            length, magic = _FOOTER.unpack(stream.read(_FOOTER.size))
            stream.seek(size - _FOOTER.size - length)
            content = orjson.loads(stream.read(length))
            has_crc = not isinstance(content, list)
            content = content if has_crc else {"table": content}
            table = content["table"]
            if verify and has_crc:
                stream.seek(0)
                crc = 0
                for start in range(0, end := size - _FOOTER.size - length, 1 << 20):
                    crc = isal_zlib.crc32(stream.read(min(1 << 20, end - start)), crc)
                if _footer_crc(content, crc) != content["crc32"]:
                    magic = b""
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; rerun the workflow") from None
    except (OSError, KeyError, TypeError, ValueError, struct.error):
        magic = b""
    if magic != _MAGIC:
        raise UserError(f"{path}: not a file of rows, or damaged; remove it and rerun the workflow")
    return {**content, "table": table}


def read_rows(path: Path, dtype: np.dtype, *, width: int = 1) -> npt.NDArray:
    count = sum(rows for _, rows in read_table(path))
    if not count:
        return np.zeros((0, width), dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype, "r", shape=(count, width))


def rows_width(path: Path, dtype: np.dtype) -> int:
    """Columns of the rows of a file; 0 if it has no row."""
    count = sum(rows for _, rows in read_table(path))
    with path.open("rb") as stream:
        size = stream.seek(-_FOOTER.size, 2)
        length, _ = _FOOTER.unpack(stream.read())
    return (size - length) // (count * dtype.itemsize) if count else 0


def read_duplicates(paths: Iterable[Path], shard: str) -> npt.NDArray[np.int64]:
    """Return the ordinals of a shard's duplicates in any of the files, ascending."""
    parts = [read_shard_rows(path, shard, dtype=ORDINAL) for path in paths]
    return np.unique(np.concatenate([np.zeros(0, ORDINAL), *parts]))


def read_near_duplicates(
    near: Iterable[Path], equal: Iterable[Path], *, shard: str
) -> npt.NDArray[np.int64]:
    """Ordinals of a shard's documents in files of near-duplicates that are in no other file."""
    return np.setdiff1d(read_duplicates(near, shard), read_duplicates(equal, shard))


def read_shard_rows(path: Path, shard: str, *, dtype: np.dtype) -> npt.NDArray:
    """(rows,) rows of a shard, in memory."""
    first = 0
    for name, rows in read_table(path):
        if name == shard:
            return np.array(read_rows(path, dtype)[first : first + rows, 0])
        first += rows
    raise UserError(f"{path}: has no shard {shard}; rerun the workflow")
