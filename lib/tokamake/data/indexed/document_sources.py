"""The sources file, PREFIX.sources: for each document of a dataset, its raw file and line.

`tokenize` and `merge` write it, `trace` reads it. After a magic come rows of four little-endian
int64: document, input, number, offset. A row starts a range: its documents are consecutive lines
(or rows) of one input. `offset` is the first byte of the line, or -1 if the input has no byte
offsets.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.indexed.paths import sources_path
from tokamake.errors import UserError

_MAGIC = b"TKMSRC\0\1"
_RANGE_BYTES_LOG2 = 20
"""A range does not cross a multiple of 2**20 bytes, so `trace` finds a line in milliseconds."""
_CHUNK = 1 << 20


class RawLocation(NamedTuple):
    """Position of a document in the raw files."""

    input: int
    """Index in the manifest's list of inputs."""
    number: int
    """Line from 1, or row from 0."""
    offset: int
    """First byte of the line that is `skip` lines before the document, or -1."""
    skip: int
    """Number of lines between `offset` and the document."""


class SourcesWriter:
    """Write a sources file from documents in order, in constant memory."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._stream.write(_MAGIC)
        self._documents = 0
        self._previous = (-1, -1, -1)  # input, number and block of the previous document

    def add(
        self,
        inputs: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
    ) -> None:
        """Append documents: the input, line or row, and offset of each, all (documents,)."""
        if not len(inputs):
            return
        blocks = offsets >> _RANGE_BYTES_LOG2
        is_start = np.empty(len(inputs), bool)
        is_start[0] = (inputs[0], numbers[0] - 1, blocks[0]) != self._previous
        is_start[1:] = (np.diff(inputs) != 0) | (np.diff(numbers) != 1) | (np.diff(blocks) != 0)
        documents = np.arange(self._documents, self._documents + len(inputs))
        self._write(np.stack([documents, inputs, numbers, offsets], axis=1)[is_start])
        self._documents += len(inputs)
        self._previous = int(inputs[-1]), int(numbers[-1]), int(blocks[-1])

    def append(self, path: Path, *, documents: int, first_input: int) -> None:
        """Append another dataset's sources file; its first input gets the number `first_input`."""
        rows = _read_rows(path)
        shift = np.array([self._documents, first_input, 0, 0])
        for start in range(0, len(rows), _CHUNK):
            self._write(rows[start : start + _CHUNK] + shift)
        self._documents += documents
        self._previous = (-1, -1, -1)

    def _write(self, rows: npt.NDArray[np.int64]) -> None:
        self._stream.write(rows.astype("<i8", copy=False).tobytes())

    def __enter__(self) -> "SourcesWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def locate_document(prefix: Path, document: int) -> RawLocation:
    """Find the raw line of an existing document by binary search."""
    rows = _read_rows(sources_path(prefix))
    row = int(np.searchsorted(rows[:, 0], document, side="right")) - 1
    if row < 0:
        raise UserError(
            f"{sources_path(prefix)}: document {document} is not in it; rebuild the dataset"
        )
    first, raw_input, number, offset = (int(value) for value in rows[row])
    return RawLocation(raw_input, number + document - first, offset, document - first)


def _read_rows(path: Path) -> npt.NDArray[np.int64]:
    """Map the rows of a sources file: (ranges, 4)."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; datasets of other programs have no sources file")
    with path.open("rb") as stream:
        magic = stream.read(len(_MAGIC))
    size = path.stat().st_size - len(_MAGIC)
    if magic != _MAGIC or size % 32:
        raise UserError(f"{path}: not a sources file; rebuild the dataset")
    if not size:  # numpy cannot map an empty array
        return np.zeros((0, 4), np.int64)
    return np.memmap(path, "<i8", "r", offset=len(_MAGIC), shape=(size // 32, 4))
