"""What readers deliver: blocks of records, each with its place in the raw file."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

LONGEST_BYTES = 1 << 30
"""Longest document that is read; what is longer is no collection of documents."""


class Bad(NamedTuple):
    """Stands in a block for a document that cannot be read."""

    reason: str
    """What is wrong and the remedy, without the place."""
    raw: bytes = b""
    """The value as it stands, where `RecordBlock.raw` has no lines."""


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


class Utf8(Sequence[str]):
    """Texts that stand one after the other in UTF-8, decoded only where one is looked at.

    Args:
        data: (bytes,) uint8, valid UTF-8 in each text.
        ends: (texts,) where each ends in it.
    """

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.data, self.ends = data, ends

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All texts of several."""
        before = np.cumsum([0, *(part.data.size for part in parts[:-1])])
        ends = [part.ends + start for part, start in zip(parts, before, strict=True)]
        return cls(np.concatenate([part.data for part in parts]), np.concatenate(ends))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(texts,) bytes of each."""
        return np.diff(self.ends, prepend=0)

    def window(self, number: int, part: slice) -> str:
        """What some bytes of a text say, without the characters that are cut in two."""
        return self._bytes(number)[part].tobytes().decode(errors="ignore")

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._bytes(range(len(self))[index]).tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        begin = 0
        for end in self.ends.tolist():
            yield self.data[begin:end].tobytes().decode()
            begin = end

    def _bytes(self, number: int) -> NDArray[np.uint8]:
        return self.data[self.ends[number - 1] if number else 0 : self.ends[number]]


class RecordBlock(NamedTuple):
    """Documents that follow one another in a file, about 0.5 MB of it or a single longer one."""

    records: Sequence[dict[str, Any] | Bad]
    """One for each document; blank lines are none."""
    numbers: NDArray[np.int64]
    """Line from 1, of the file or of a range that starts inside it, or row of the file from 0."""
    offsets: NDArray[np.int64]
    """Byte of a plain file where the line begins; -1 in compressed files and tables."""
    raw: Lines | list[bytes] | None
    """The lines as they stand, without line feed; None for tables."""
    texts: Utf8 | None = None
    """What each record has under the only key asked for, where that is at hand and all have it."""
