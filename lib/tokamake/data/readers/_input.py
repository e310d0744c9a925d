"""A raw file or a byte range of it: yields its documents, and counts and hashes the bytes read."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from tokamake import plugins
from tokamake.data.readers._compression import unpack, unpack_members
from tokamake.data.readers._format_settings import default_settings
from tokamake.data.readers._records import RecordBlock
from tokamake.errors import UserError
from tokamake.runtime.cores import file_workers, prefetched

Bytes = bytes  # inside `Input`, `bytes` is a count

CHUNK_BYTES = 1 << 19
"""Number of bytes read at once. Memory holds several copies of a chunk's content."""

_FOLDER = "data/readers"
_COUNTED_BYTES = 1 << 34  # counting the lines of more bytes takes too long for a message
_SMALL_BYTES = 1 << 20  # for smaller files, a reading thread costs more than it saves


@cache
def readers() -> dict[str, ModuleType]:
    return {name: plugins.load(_FOLDER, name) for name in plugins.names(_FOLDER)}


def is_one_document(format: str) -> bool:
    """Whether each file of a format is a single document."""
    return bool(plugins.constant(_FOLDER, format, "IS_ONE_DOCUMENT", default=False))


class Input:
    """A raw file, or the documents of it that begin in a byte range.

    All counts are complete when the iterator of `blocks` is exhausted.
    """

    path: Path
    format: str
    """Name of the reader, such as jsonl."""
    settings: dict[str, str]
    """Settings of the format, all of them."""
    workers: int
    """Number of processes that extract texts, where the format needs them."""
    compression: str
    """gz, zst, xz, bz2, lzma, or empty."""
    head: Bytes
    """First bytes of the decompressed content."""
    start: int
    end: int | None
    """Requested byte range; None is the end of the file."""
    unit: str
    """Unit of `RecordBlock.numbers`: line, row, page or record."""
    bytes: int
    """Bytes read from disk (before decompression): of the file, or of the range's documents."""
    first_byte: int
    """Position of the first line of a jsonl range."""
    documents: int
    """Number of good and bad documents, without blank lines."""
    blank_lines: int
    skipped: dict[str, int]
    """Number of items that are no documents, by reason: pages of a dump that are no articles."""
    chunk_bytes: int
    """Bytes read at once, 0: CHUNK_BYTES. `bytes` is ahead of the blocks by up to two chunks."""
    metadata_keys: tuple[str, ...]
    """Fields beside the texts that records have, if the file has them."""

    def __init__(self, path: Path, format: str, *, compression: str, head: Bytes) -> None:
        self.path, self.format, self.compression, self.head = path, format, compression, head
        self.start, self.end = 0, None
        self.first_byte = 0
        self.metadata_keys, self.chunk_bytes = (), 0
        self.settings, self.workers = default_settings(format), file_workers()
        self._num_lines_before: int | None = None
        self.unit = readers()[format].UNIT
        self._reset()

    def _reset(self) -> None:
        self.bytes = self.documents = self.blank_lines = 0
        self.skipped = {}
        self._hash = hashlib.sha256()

    @property
    def stated_settings(self) -> dict[str, str]:
        """Settings that differ from the defaults."""
        return dict(self.settings.items() - default_settings(self.format).items())

    @property
    def is_one_document(self) -> bool:
        return is_one_document(self.format)

    @property
    def sha256(self) -> str:
        """Hexadecimal hash of the bytes that `bytes` counts."""
        return self._hash.hexdigest()

    def blocks(
        self, keys: tuple[str, ...], metadata_keys: tuple[str, ...] = ()
    ) -> Iterator[RecordBlock]:
        """Yield the documents in file order. Each call begins at the first document.

        Readers of tables read no other columns than `keys` and `metadata_keys`. A damaged file
        raises UserError; a bad document becomes a `BadRecord`.
        """
        self._reset()
        self.metadata_keys = metadata_keys
        reader = readers()[self.format]
        if getattr(reader, "READS_COLUMNS", False):
            keys = tuple(dict.fromkeys((*keys, *metadata_keys)))
        for block in reader.read(self, keys):
            self.documents += len(block.records)
            yield block

    def place(self, number: int, offset: int = -1) -> str:
        """Return a document's position for messages: raw/a.jsonl:17 or raw/a.parquet: row 5.

        A file that is one document, such as a web page, is its own position.
        In a byte range, line numbers include the lines before the range. Where counting these
        takes too long, the result is the byte position. A page of a dump without a number has 0.
        """
        if self.is_one_document or (self.unit == "page" and number == 0):
            return str(self.path)
        if self.unit != "line":
            return f"{self.path}: {self.unit} {number}"
        num_before = self.lines_before()
        if num_before is None:
            return f"{self.path}: byte {offset}"
        return f"{self.path}:{num_before + number}"

    def lines_before(self) -> int | None:
        """Return the number of lines before the range, or None if counting takes too long."""
        if self.start > _COUNTED_BYTES:
            return None
        if self._num_lines_before is None:
            with reading(self.path), self.path.open("rb") as stream:
                count, left = 0, self.first_byte
                while left and (chunk := stream.read(min(left, CHUNK_BYTES))):
                    count += chunk.count(b"\n")
                    left -= len(chunk)
            self._num_lines_before = count
        return self._num_lines_before

    def chunks(self, start: int = 0, end: int | None = None) -> Iterator[Bytes]:
        """Yield decompressed bytes; for an uncompressed file, bytes [start, end)."""
        chunks = self._raw_chunks(start, end)
        if self.compression:
            chunks = unpack(chunks, self.compression, path=self.path, block_bytes=CHUNK_BYTES)
        with reading(self.path):
            is_small = self.path.stat().st_size < _SMALL_BYTES
        return chunks if is_small else prefetched(chunks)

    def members(self, start: int, end: int | None) -> Iterator[tuple[int, Bytes]]:
        """Yield decompressed bytes in [start, end), with the first byte of their stream."""
        chunks = self._raw_chunks(start, end)
        name, path = self.compression, self.path
        return prefetched(unpack_members(chunks, name, path=path, first_byte=start))

    def count(self) -> None:
        """Count and hash the bytes of the range, for readers that do not use `chunks`."""
        for _ in self._raw_chunks(self.start, self.end):
            pass

    def _raw_chunks(self, start: int, end: int | None) -> Iterator[Bytes]:
        with reading(self.path), self.path.open("rb", buffering=0) as stream:
            stream.seek(start)
            step = self.chunk_bytes or CHUNK_BYTES
            left = step if end is None else end - start
            while left and (chunk := stream.read(min(step, left))):
                self._hash.update(chunk)
                self.bytes += len(chunk)
                left -= 0 if end is None else len(chunk)
                yield chunk
            if left and end is not None:
                raise UserError(
                    f"{self.path}: was truncated while being read; rerun when it is complete"
                )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn `OSError` into `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror or error}); fix the list of files or the disk"
        ) from None
