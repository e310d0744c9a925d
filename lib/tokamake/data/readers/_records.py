"""Output of readers: blocks of records with their positions in the raw file."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

LONGEST_BYTES = 1 << 30
"""Maximum size of a document. A longer line or text file is not a collection of documents."""

Item = TypeVar("Item", covariant=True)


class BadRecord(NamedTuple):
    """Takes the place of a document that cannot be read."""

    reason: str
    """The fault and the remedy, without the position."""
    raw: bytes = b""
    """The original value, where `RecordBlock.raw` is None."""


def value_of(record: Any, key: str) -> Any:
    """Value of a key, or KeyError. If a record lacks `meta.text`, look for `text` in `meta`."""
    if key in record or "." not in key:
        return record[key]
    for part in key.split("."):
        if not isinstance(record, dict):
            raise KeyError(key)
        record = record[part]
    return record


def with_unicode(record: Any, keys: tuple[str, ...]) -> Any:
    """Return the parsed record, or a `BadRecord` if a text under a key has a surrogate."""
    for key in keys if isinstance(record, dict) else ():
        with suppress(KeyError):
            if isinstance(text := value_of(record, key), str) and not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    where = f'character {error.start} of "{key}"'
                    reason = f"a lone surrogate is no text ({where}); fix or remove it"
                    return BadRecord(reason, json.dumps(record).encode())
    return record


def integer(text: str) -> int | float:
    """Parse an integer as orjson does: one of more than 64 bits becomes a float."""
    value = int(text) if len(text) <= 20 else float(text)
    return value if -(2**63) <= value < 2**64 else float(value)


def utf8_fault(error: UnicodeDecodeError, where: str = "") -> str:
    return f"not valid UTF-8 (0x{error.object[error.start]:02x} at byte {error.start:,}{where})"


def read_all(chunks: Iterable[bytes], max_bytes: int) -> bytes | None:
    """Join chunks; None if they are longer than `max_bytes`."""
    parts, size = [], 0
    for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            return None
    return b"".join(parts)


class LazySequence(Sequence[Item]):
    """Sequence that makes each item on access. Subclasses define `__len__` and `item`."""

    @abstractmethod
    def item(self, index: int) -> Item:
        """Make the item at an index from 0 to length - 1."""

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self.item(position) for position in range(len(self))[index]]
        return self.item(range(len(self))[index])


class Lines(LazySequence[bytes]):
    """Original lines without line feed. Access copies a line out of the file's memory."""

    def __init__(self, views: Sequence[bytes | memoryview]) -> None:
        self._views = views

    def __len__(self) -> int:
        return len(self._views)

    def item(self, index: int) -> bytes:
        return bytes(self._views[index])


class Utf8(LazySequence[str]):
    """Texts stored one after the other in UTF-8. Access decodes a text.

    `data` (bytes,) is uint8 and valid UTF-8; `ends` (texts,) is the end of each text in it.
    """

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.data, self.ends = data, ends

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate several sequences of texts."""
        starts = np.cumsum([0, *(part.data.size for part in parts[:-1])])
        ends = [part.ends + start for part, start in zip(parts, starts, strict=True)]
        return cls(np.concatenate([part.data for part in parts]), np.concatenate(ends))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(texts,) bytes of each text."""
        return np.diff(self.ends, prepend=0)

    def window(self, number: int, part: slice) -> str:
        """Decode some bytes of a text, without the characters that the window cuts."""
        return self.utf8(number)[part].tobytes().decode(errors="ignore")

    def __len__(self) -> int:
        return len(self.ends)

    def item(self, index: int) -> str:
        return self.utf8(index).tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        # Faster than the inherited iteration, which computes the start of each text again.
        start = 0
        for end in self.ends.tolist():
            yield self.data[start:end].tobytes().decode()
            start = end

    def utf8(self, number: int) -> NDArray[np.uint8]:
        """(bytes,) view of a text."""
        return self.data[self.ends[number - 1] if number else 0 : self.ends[number]]


def select_texts(
    texts: Sequence[str], kept: Sequence[int], *, changed: Mapping[int, str] = MappingProxyType({})
) -> Sequence[str]:
    """Return the texts at ascending indices; `changed` replaces some of them.

    Texts in UTF-8 stay in UTF-8, which the encoder reads fastest.
    """
    if len(kept) == len(texts) and not changed:
        return texts
    if not isinstance(texts, Utf8):
        return [changed.get(index, texts[index]) for index in kept]
    parts = [
        np.frombuffer(changed[index].encode(), np.uint8) if index in changed else texts.utf8(index)
        for index in kept
    ]
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return Utf8(np.concatenate([np.zeros(0, np.uint8), *parts]), ends)


class RecordBlock(NamedTuple):
    """Consecutive documents of a file: about 0.5 MB of it, or a single longer document."""

    records: Sequence[dict[str, Any] | BadRecord]
    """One record per document; blank lines have none."""
    numbers: NDArray[np.int64]
    """Line numbers from 1 in the file (in the range, if it starts inside the file), or row numbers
    from 0 in the file."""
    offsets: NDArray[np.int64]
    """First byte of each line in an uncompressed file; -1 in compressed files and tables."""
    raw: Sequence[bytes] | None
    """The original lines without line feed; None for tables."""
    texts: Utf8 | None = None
    """Value of the only requested key in each record, if the reader has already decoded all of
    them."""


def row_block(records: Sequence[dict[str, Any] | BadRecord], first_row: int) -> RecordBlock:
    numbers = np.arange(first_row, first_row + len(records), dtype=np.int64)
    return RecordBlock(records, numbers, np.full_like(numbers, -1), None)
