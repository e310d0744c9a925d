"""One raw file, or a range of it: gives its documents, counts and hashes what goes through."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from tokamake import plugins
from tokamake.data.readers._compression import unpack
from tokamake.data.readers._records import RecordBlock
from tokamake.errors import UserError
from tokamake.runtime.cores import ahead

Bytes = bytes  # `Input.bytes` is a number

_COUNTED_BYTES = 1 << 34
CHUNK_BYTES = 1 << 19
"""What is read from a file at once; what comes of it is in memory several times."""

_SMALL_BYTES = 1 << 20  # a thread to read less costs more than it saves


@cache
def readers() -> dict[str, ModuleType]:
    """The plug-ins by name."""
    folder = "data/readers"
    return {name: plugins.load(folder, name) for name in plugins.names(folder)}


class Input:
    """A raw file, or the part of it that begins in a byte range.

    All counts are complete once the iterator of `blocks` has ended.
    """

    path: Path
    format: str
    """Name of the reader: jsonl, parquet, arrow, text."""
    compression: str
    """gz, zst, xz, bz2, or empty."""
    head: Bytes
    """First bytes of the decompressed content."""
    start: int
    end: int | None
    """Byte range asked for; None is the end of the file."""
    unit: str
    """What `RecordBlock.numbers` count: line or row."""
    bytes: int
    """Raw bytes, compressed ones if so, of the file or of the documents of the range."""
    first_byte: int
    """Where the first line of a jsonl range begins."""
    documents: int
    """Good and bad ones; blank lines are none."""
    blank_lines: int

    def __init__(self, path: Path, format: str, compression: str, head: Bytes) -> None:
        self.path, self.format, self.compression, self.head = path, format, compression, head
        self.start, self.end = 0, None
        self.first_byte = 0
        self._before: int | None = None
        self.unit = readers()[format].UNIT
        self._reset()

    def _reset(self) -> None:
        self.bytes = self.documents = self.blank_lines = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hash of `bytes`, in hexadecimal."""
        return self._hash.hexdigest()

    def blocks(self, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
        """Documents in the order of the file, from the beginning each time.

        Args:
            keys: what a record should have; tables read no other columns.

        Raises:
            UserError: the file is damaged, missing, or not what it seemed to be. Bad documents
                raise nothing: they are `Bad` records.
        """
        self._reset()
        for block in readers()[self.format].read(self, keys):
            self.documents += len(block.records)
            yield block

    def place(self, number: int, offset: int = -1) -> str:
        """Where a document stands, for messages: raw/a.jsonl:17, or raw/a.parquet: row 5.

        In a range, the lines before it are counted; very far in a file the byte is told instead.

        Args:
            number: of `RecordBlock.numbers`.
            offset: of `RecordBlock.offsets`; the place in a range whose lines have no number.
        """
        if self.unit == "row":
            return f"{self.path}: row {number}"
        before = self.lines_before()
        if before is None:
            return f"{self.path}: byte {offset}"
        return f"{self.path}:{before + number}"

    def lines_before(self) -> int | None:
        """Lines before the range, counted where that takes seconds, else None."""
        if self.start > _COUNTED_BYTES:
            return None
        if self._before is None:
            with reading(self.path), self.path.open("rb") as stream:
                self._before, left = 0, self.first_byte
                while left and (chunk := stream.read(min(left, CHUNK_BYTES))):
                    self._before += chunk.count(b"\n")
                    left -= len(chunk)
        return self._before

    def chunks(self, start: int = 0, end: int | None = None) -> Iterator[Bytes]:
        """Decompressed bytes; of a plain file, those in [start, end). Raw ones are counted."""
        chunks = self._raw(start, end)
        if self.compression:
            chunks = unpack(chunks, self.compression, self.path, block_bytes=CHUNK_BYTES)
        with reading(self.path):
            small = self.path.stat().st_size < _SMALL_BYTES
        return chunks if small else ahead(chunks)

    def count(self) -> None:
        """Count and hash the raw bytes of the range, for readers that need no `chunks`."""
        for _ in self._raw(self.start, self.end):
            pass

    def _raw(self, start: int, end: int | None) -> Iterator[Bytes]:
        with reading(self.path), self.path.open("rb", buffering=0) as stream:
            stream.seek(start)
            left = CHUNK_BYTES if end is None else end - start
            while left and (chunk := stream.read(min(CHUNK_BYTES, left))):
                self._hash.update(chunk)
                self.bytes += len(chunk)
                left -= 0 if end is None else len(chunk)
                yield chunk
            if left and end is not None:
                raise UserError(
                    f"{self.path}: became shorter while it was read; run again once it is whole"
                )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the system's errors into `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror or error}); fix the list of files or the disk"
        ) from None
