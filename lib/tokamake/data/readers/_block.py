"""What readers deliver: blocks of records, each with its place in the raw file."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LONGEST_BYTES = 1 << 30
"""Longest document that is read; what is longer is no collection of documents."""


class Bad(NamedTuple):
    """Stands in a block for a document that cannot be read."""

    reason: str
    """What is wrong and the remedy, without the place."""
    raw: bytes = b""
    """The value as it stands, where `Block.raw` has no lines."""


class Lines:
    """Lines as they stand, without line feed, copied out of the file as they are asked for."""

    def __init__(self, views: Sequence[bytes | memoryview]) -> None:
        self._views = views

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._views[index])

    def __iter__(self) -> Iterator[bytes]:
        return map(bytes, self._views)


class Block(NamedTuple):
    """Documents that follow one another in a file, about 0.5 MB of it or a single longer one."""

    records: list[dict[str, Any] | Bad]
    """One for each document; blank lines are none."""
    numbers: NDArray[np.int64]
    """Line from 1, of the file or of a range that starts inside it, or row of the file from 0."""
    offsets: NDArray[np.int64]
    """Byte of a plain file where the line begins; -1 in compressed files and tables."""
    raw: Lines | list[bytes] | None
    """The lines as they stand, without line feed; None for tables."""
