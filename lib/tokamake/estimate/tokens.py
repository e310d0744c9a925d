"""Tokens of raw files, estimated from a seeded sample of places in them.

Uncompressed jsonl is read at random places. Of other files, some are read: whole, or the beginning
of a large compressed one. All of a small corpus is read, and its tokens are exact.
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
_CONFIDENCE = 1.96
"""Standard errors on each side of an estimate, for 95 % confidence."""


class Count(NamedTuple):
    """Documents and tokens of some raw files."""

    documents: float = 0.0
    tokens: float = 0.0
    error: float = 0.0
    """Tokens by which the estimate may be wrong, at 95 % confidence; 0: all were counted."""

    def plus(self, other: "Count") -> "Count":
        """Sum of independent counts."""
        error = math.hypot(self.error, other.error)
        return Count(self.documents + other.documents, self.tokens + other.tokens, error)


class _SampledPart(NamedTuple):
    """Some documents of raw files."""

    bytes: float
    """Bytes of the raw files that they take; of a block, bytes of its texts."""
    documents: int
    tokens: int


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
    at_random = [path for path in paths if _has_lines(path, format)]
    whole = [path for path in paths if path not in {*at_random}]
    chance = random.Random(seed)
    found = counter.places(at_random, sample_bytes, chance=chance)
    return found.plus(counter.files(whole, sample_bytes, chance=chance))


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
            return _total([_joined(*pair) for pair in zip(read, sizes, strict=True)], total)
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
        return _total(parts, total)

    def files(self, paths: Sequence[Path], sample_bytes: int, *, chance: random.Random) -> Count:
        """Estimate from some files, or count all of them."""
        total = sum(path.stat().st_size for path in paths)
        parts: list[_SampledPart] = []
        read = 0
        for path in chance.sample([*paths], len(paths)):
            if read >= sample_bytes and len(parts) >= _FEWEST_FILES:
                break
            size, blocks = self._beginning(path, max(sample_bytes // _FEWEST_FILES, 1))
            read += size
            # The blocks of the only file tell how much its parts differ.
            groups = [blocks] if len(paths) > 1 else [[block] for block in blocks]
            text_bytes = sum(block.bytes for block in blocks) or 1
            parts += [_joined(g, size * sum(b.bytes for b in g) / text_bytes) for g in groups]
        return _total(parts, total)

    def _beginning(self, path: Path, most: int) -> "tuple[int, list[_SampledPart]]":
        """Bytes that are read of a file, all or the beginning of a large stream; its blocks."""
        size = path.stat().st_size
        source = open_input(path, format=self._format)
        if size <= most or not source.compression:
            return size, self._read(source)
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder, Path(path.name).stem)
            with path.open("rb") as stream:
                text.write_bytes(beginning(stream.read(most), source.compression, path=path))
            return most, self._read(open_input(text, format=self._format))

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


def _joined(blocks: Sequence[_SampledPart], size: float) -> _SampledPart:
    """Blocks as one part of so many bytes of a raw file."""
    return _SampledPart(size, sum(b.documents for b in blocks), sum(b.tokens for b in blocks))


def _total(parts: Sequence[_SampledPart], size: int) -> Count:
    """Totals of all bytes from parts of them: a ratio estimate, with its error."""
    read = sum(part.bytes for part in parts)
    if not read:
        return Count()
    scale = size / read
    num_documents, num_tokens = (sum(part[i] for part in parts) for i in (1, 2))
    if read > size * (1 - 1e-9) or len(parts) < 2:
        return Count(num_documents * scale, num_tokens * scale)
    residuals = (part.tokens - num_tokens / read * part.bytes for part in parts)
    variance = sum(residual**2 for residual in residuals) * len(parts) / (len(parts) - 1)
    error = _CONFIDENCE * scale * math.sqrt(variance * (1 - read / size))
    return Count(num_documents * scale, num_tokens * scale, error)
