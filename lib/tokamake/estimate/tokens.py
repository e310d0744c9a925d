"""Tokens of raw files, estimated from a seeded sample of places in them.

Uncompressed jsonl is read at random places. Of other files, some are read: whole, or the beginning
of a large one. All of a small corpus is read, and its tokens are exact.
"""

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tokamake.data.corpus import documents
from tokamake.data.corpus.documents import Fields
from tokamake.data.readers import Input, has_byte_ranges, open_input, parse_format, sniff
from tokamake.data.readers._compression import beginning
from tokamake.data.tokenize.encoder import text_size
from tokamake.errors import UserError

_NUM_PLACES = 64
"""Places at which large uncompressed files are read."""
_FEWEST_FILES = 4
"""Files of other kinds that are read at least, if there are so many."""
_CHUNK_BYTES = 1 << 14
"""Size of one read of a large file; a reader is few such reads ahead of its blocks."""
_CONFIDENCE = 1.96
"""Standard errors on each side of an estimate, for 95 % confidence."""


class Count(NamedTuple):
    """Documents and tokens of some raw files."""

    documents: float = 0.0
    tokens: float = 0.0
    error: float | None = 0.0
    """Tokens by which the estimate may be wrong, at 95 % confidence; None: not known."""
    is_all: bool = True
    """Whether all documents were counted."""

    def plus(self, other: "Count") -> "Count":
        """Sum of independent counts."""
        is_known = self.error is not None and other.error is not None
        error = math.hypot(self.error or 0, other.error or 0) if is_known else None
        documents, tokens = self.documents + other.documents, self.tokens + other.tokens
        return Count(documents, tokens, error, self.is_all and other.is_all)


class _SampledPart(NamedTuple):
    """Some documents of raw files."""

    bytes: float
    """Bytes of the raw files that they take; of a block, bytes of its texts."""
    documents: int
    tokens: int


class _Beginning(NamedTuple):
    """Blocks of documents at the beginning of a file."""

    bytes: float
    """Bytes of the file that they take."""
    blocks: list[_SampledPart]
    is_all: bool = True
    """Whether they are all blocks of the file."""


Tokenize = Callable[[Sequence[str]], Sequence[int]]
"""Texts to the number of tokens of each."""


def count_tokens(
    paths: Sequence[Path],
    tokenize: Tokenize,
    *,
    fields: Fields,
    format: str = "",
    tokens_per_document: int = 0,
    sample_bytes: int,
    seed: int,
) -> Count:
    """Count or estimate the documents and tokens of raw files, before filters.

    Args:
        tokens_per_document: tokens added to each document that is not empty.
        sample_bytes: bytes of raw files to read of each kind, about.
    """
    counter = _Counter(tokenize, fields, format=format, added=tokens_per_document)
    kinds: dict[bool, list[Path]] = {True: [], False: []}
    for path in paths:
        kinds[_has_lines(path, format)].append(path)
    chance = random.Random(seed)
    found = counter.places(kinds[True], sample_bytes, chance=chance)
    return found.plus(counter.files(kinds[False], sample_bytes, chance=chance))


def _has_lines(path: Path, format: str) -> bool:
    """Whether any byte range of a file holds the documents that begin in it."""
    kind, packing = sniff(path, parse_format(format)[0])
    return kind == "jsonl" and not packing and has_byte_ranges(path, kind)


class _Counter:
    """Reads parts of raw files, and makes totals of them."""

    def __init__(self, tokenize: Tokenize, fields: Fields, *, format: str, added: int) -> None:
        self._tokenize, self._fields, self._format, self._added = tokenize, fields, format, added

    def places(self, paths: Sequence[Path], sample_bytes: int, *, chance: random.Random) -> Count:
        """Estimate from byte ranges at random places, one in each of equal parts of all bytes."""
        sizes = [path.stat().st_size for path in paths]
        total = sum(sizes)
        if total <= sample_bytes:
            read = [self._read(open_input(path, format=self._format)) for path in paths]
            parts = [_joined(*pair) for pair in zip(read, sizes, strict=True)]
            return _total(parts, total, is_all=True)
        length = sample_bytes // _NUM_PLACES
        parts = []
        for number in range(_NUM_PLACES):
            place = int((number + chance.random()) * total / _NUM_PLACES)
            index = 0
            while place >= sizes[index]:
                place -= sizes[index]
                index += 1
            end = min(place + length, sizes[index])
            byte_range = place, end if end < sizes[index] else None
            source = open_input(paths[index], byte_range=byte_range, format=self._format)
            blocks = self._read(source)
            parts.append(_joined(blocks, source.bytes if blocks else 0))  # of its documents
        return _total(parts, total, is_all=False)

    def files(self, paths: Sequence[Path], sample_bytes: int, *, chance: random.Random) -> Count:
        """Estimate from some files, or count all of them."""
        total = sum(path.stat().st_size for path in paths)
        parts: list[_SampledPart] = []
        read, is_all = 0.0, True
        for path in chance.sample([*paths], len(paths)):
            if read >= sample_bytes and len(parts) >= _FEWEST_FILES:
                is_all = False
                break
            found = self._beginning(path, max(sample_bytes // _FEWEST_FILES, 1))
            size, blocks = found.bytes, [b for b in found.blocks if b.documents]
            read, is_all = read + size, is_all and found.is_all
            # The blocks of the only file tell how much its parts differ.
            groups = [blocks] if len(paths) > 1 else [[block] for block in blocks]
            text_bytes = sum(block.bytes for block in blocks) or 1
            parts += [_joined(g, size * sum(b.bytes for b in g) / text_bytes) for g in groups]
        return _total(parts, total, is_all=is_all)

    def _beginning(self, path: Path, most: int) -> _Beginning:
        """Read a file, or the beginning of one of more than `most` bytes."""
        size = path.stat().st_size
        source = open_input(path, format=self._format)
        if size <= most:
            return _Beginning(size, self._read(source))
        if source.compression:
            with tempfile.TemporaryDirectory() as folder:
                text = Path(folder, Path(path.name).stem)
                with path.open("rb") as stream:
                    text.write_bytes(beginning(stream.read(most), source.compression, path=path))
                blocks = self._read(open_input(text, format=self._format))
                return _Beginning(most if blocks else 0, blocks, is_all=False)
        blocks, source.chunk_bytes = [], _CHUNK_BYTES
        for columns in self._texts(source):
            blocks.append(self._block(columns))
            read = _bytes_read(source, size)
            if read and max(read, sum(block.bytes for block in blocks)) >= most:
                return _Beginning(read, blocks, is_all=False)
        return _Beginning(size, blocks)

    def _read(self, source: Input) -> list[_SampledPart]:
        """Blocks of documents, with the bytes of their texts."""
        return [self._block(columns) for columns in self._texts(source)]

    def _block(self, columns: tuple[Sequence[str], ...]) -> _SampledPart:
        lengths = [length for column in columns for length in self._tokenize(column)]
        num_tokens = sum(length + self._added for length in lengths if length)
        return _SampledPart(sum(map(text_size, columns)), len(lengths), num_tokens)

    def _texts(self, source: Input) -> Iterator[tuple[Sequence[str], ...]]:
        # The last line of a beginning is cut off; a damaged file is for the stage to report.
        with suppress(UserError):
            for block in source.blocks(self._fields.read_keys):
                yield documents.texts(block, self._fields).columns


def _bytes_read(source: Input, size: int) -> float:
    """Bytes of an uncompressed file that its blocks until now take; 0: not known."""
    if source.format == "parquet":
        import pyarrow.parquet as parquet

        num_rows = parquet.read_metadata(source.path).num_rows
        return size * source.documents / max(1, num_rows)
    return source.bytes


def _joined(blocks: Sequence[_SampledPart], size: float) -> _SampledPart:
    """Blocks as one part of so many bytes of a raw file."""
    return _SampledPart(size, sum(b.documents for b in blocks), sum(b.tokens for b in blocks))


def _total(parts: Sequence[_SampledPart], size: int, *, is_all: bool) -> Count:
    """Totals of all bytes from parts of them: a ratio estimate, with its error."""
    read = sum(part.bytes for part in parts)
    if not read:
        return Count(error=0.0 if is_all else None, is_all=is_all)
    scale = size / read
    num_documents, num_tokens = (sum(part[i] for part in parts) for i in (1, 2))
    if is_all:
        return Count(num_documents, num_tokens)
    if len(parts) < 2:
        return Count(num_documents * scale, num_tokens * scale, None, is_all=False)
    residuals = (part.tokens - num_tokens / read * part.bytes for part in parts)
    variance = sum(residual**2 for residual in residuals) * len(parts) / (len(parts) - 1)
    error = _CONFIDENCE * scale * math.sqrt(variance * max(0, 1 - read / size))
    return Count(num_documents * scale, num_tokens * scale, error, is_all=False)
