"""Draw documents of a corpus from places all over its raw files, without reading all of them."""

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokamake.data.corpus import documents
from tokamake.data.corpus.documents import Fields, Texts
from tokamake.data.readers import Input, RecordBlock, open_input, select_texts
from tokamake.data.readers._input import readers

_MAX_PARTS = 32
_MIN_PART_BYTES = 1 << 20


class DrawnBlock(NamedTuple):
    """Some consecutive documents of a block."""

    source: Input
    block: RecordBlock
    columns: tuple[Sequence[str], ...]
    """Texts of the good documents, one sequence per text key."""
    indices: NDArray[np.int64]
    """(documents,) index in the block of each good document."""
    bad: list[tuple[int, str]]
    """Index in the block, and reason, of each document that cannot be read."""

    @property
    def num_documents(self) -> int:
        return len(self.indices) + len(self.bad)


def draw(
    paths: Sequence[Path],
    number: int,
    *,
    fields: Fields,
    format: str = "",
    metadata_keys: tuple[str, ...] = (),
) -> Iterator[DrawnBlock]:
    """Yield `number` documents, or all if there are fewer; the same ones at each call.

    They are equal numbers of consecutive documents from evenly spaced files, and from evenly spaced
    places of large uncompressed jsonl and parquet files. More files are read if these are short.
    """
    stride = -(-len(paths) // _MAX_PARTS)
    for first in range(stride):
        if number <= 0:
            return
        files = paths[first::stride]
        parts = [
            _DrawnPart(source, fields, metadata_keys=metadata_keys)
            for path in files
            for source in _parts(path, _MAX_PARTS // len(files), format=format)
        ]
        for drawn in _in_turn(parts, number):
            number -= drawn.num_documents
            yield drawn


def _in_turn(parts: "list[_DrawnPart]", number: int) -> Iterator[DrawnBlock]:
    """Yield documents of parts, equally many of each as far as they have them."""
    try:
        while parts and number > 0:
            share = -(-number // len(parts))
            for part in parts:
                for drawn in part.take(min(share, number)):
                    number -= drawn.num_documents
                    yield drawn
            parts = [part for part in parts if not part.is_exhausted]
    finally:
        for part in parts:
            part.close()


def _parts(path: Path, number: int, *, format: str) -> Iterator[Input]:
    """Open a file at several places, if its format allows it and it is large."""
    source = open_input(path, format=format)
    size = path.stat().st_size
    number = min(number, size // _MIN_PART_BYTES)
    if number < 2 or source.compression or not readers()[source.format].HAS_BYTE_RANGES:
        yield source
        return
    bounds = [size * part // number for part in range(number)]
    for start, end in zip(bounds, [*bounds[1:], None], strict=True):
        yield open_input(path, byte_range=(start, end), format=format)


class _DrawnPart:
    """Documents of a file or of a byte range of it, to take a few at a time."""

    def __init__(self, source: Input, fields: Fields, *, metadata_keys: tuple[str, ...]) -> None:
        self._source, self._fields = source, fields
        self._blocks = source.blocks(fields.read_keys, metadata_keys)
        self._block: RecordBlock | None = None
        self._first = 0
        self.is_exhausted = False

    def take(self, number: int) -> Iterator[DrawnBlock]:
        """Yield the next documents, or the rest if there are fewer."""
        while number > 0:
            if self._block is None:
                self._block = next(self._blocks, None)
                self._first = 0
            if self._block is None:
                self.is_exhausted = True
                return
            end = min(self._first + number, len(self._block.records))
            yield self._drawn(self._block, self._first, end=end)
            number -= end - self._first
            self._first = end
            if end == len(self._block.records):
                self._block = None

    def _drawn(self, block: RecordBlock, first: int, *, end: int) -> DrawnBlock:
        found: Texts = documents.texts(block, self._fields)
        chosen = np.flatnonzero((found.kept >= first) & (found.kept < end))
        columns = tuple(select_texts(column, chosen.tolist()) for column in found.columns)
        bad = [(index, reason) for index, reason in found.bad if first <= index < end]
        return DrawnBlock(self._source, block, columns, found.kept[chosen], bad)

    def close(self) -> None:
        """Stop reading the file, and the threads that read ahead."""
        if isinstance(self._blocks, Generator):
            self._blocks.close()
