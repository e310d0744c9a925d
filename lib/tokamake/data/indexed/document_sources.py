"""The way back from a document to its raw line: PREFIX.sources, written beside a pair.

`tokenize` and `merge` write it, `trace` reads it. After a magic come rows of four little-endian
int64: document, input, number, offset. A row says where a run begins whose documents follow one
another in one input, line by line or row by row; `offset` is the line's first byte or -1.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.errors import UserError

_MAGIC = b"TKMSRC\0\1"
_MEBIBYTE = 20
"""A run ends at least at each 2**20 bytes, so that finding a line in it takes milliseconds."""


class RawLocation(NamedTuple):
    """Where a document stands in the raw files."""

    input: int
    """Index in the manifest's list of inputs."""
    number: int
    """Line from 1, or row from 0."""
    offset: int
    """First byte of the line `skip` lines before it, or -1."""
    skip: int
    """Lines between `offset` and the document."""


def sources_path(prefix: Path) -> Path:
    """Path of the map beside a pair."""
    return prefix.with_name(prefix.name + ".sources")


class SourcesWriter:
    """Writes the map as documents come; memory does not grow with it."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._stream.write(_MAGIC)
        self._documents = 0
        self._last = (-1, -1, -1)

    def add(
        self,
        inputs: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
    ) -> None:
        """Append documents: the input, line or row, and offset of each, all (documents,)."""
        if not len(inputs):
            return
        blocks = offsets >> _MEBIBYTE
        begins = np.empty(len(inputs), bool)
        begins[0] = (inputs[0], numbers[0] - 1, blocks[0]) != self._last
        begins[1:] = (np.diff(inputs) != 0) | (np.diff(numbers) != 1) | (np.diff(blocks) != 0)
        documents = np.arange(self._documents, self._documents + len(inputs))
        self._write(np.stack([documents, inputs, numbers, offsets], axis=1)[begins])
        self._documents += len(inputs)
        self._last = int(inputs[-1]), int(numbers[-1]), int(blocks[-1])

    def append(self, other: Path, *, documents: int, first_input: int) -> None:
        """Append the map of a pair of so many documents, whose inputs count from `first_input`."""
        rows = _rows(other)
        for start in range(0, len(rows), 1 << 20):
            shift = np.array([self._documents, first_input, 0, 0])
            self._write(rows[start : start + (1 << 20)] + shift)
        self._documents += documents
        self._last = (-1, -1, -1)

    def _write(self, rows: npt.NDArray[np.int64]) -> None:
        self._stream.write(rows.astype("<i8", copy=False).tobytes())

    def __enter__(self) -> "SourcesWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def find(prefix: Path, document: int) -> RawLocation:
    """Find the place of a document, which must exist, by binary search.

    Raises:
        UserError: the map is missing or damaged.
    """
    rows = _rows(sources_path(prefix))
    index = int(np.searchsorted(rows[:, 0], document, side="right")) - 1
    if index < 0:
        raise UserError(f"{sources_path(prefix)}: knows no document {document}; make it again")
    first, source, number, offset = (int(value) for value in rows[index])
    return RawLocation(source, number + document - first, offset, document - first)


def _rows(path: Path) -> npt.NDArray[np.int64]:
    """(runs, 4) memory map of a file's rows."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; pairs of other programs have no map of sources")
    with path.open("rb") as stream:
        head = stream.read(len(_MAGIC))
    size = path.stat().st_size - len(_MAGIC)
    if head != _MAGIC or size % 32:
        raise UserError(f"{path}: not a map of sources; make the pair again")
    if not size:
        return np.zeros((0, 4), np.int64)
    return np.memmap(path, "<i8", "r", offset=len(_MAGIC), shape=(size // 32, 4))
