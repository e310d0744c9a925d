"""Megatron's indexed dataset: a .bin file of tokens and an .idx file of sequence bounds.

`tokenize` and `merge` write it. The sample index and the loader read it memory-mapped.

Layout of the .idx file (little-endian): magic `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code,
u64 sequences n, u64 m = documents + 1, i32[n] lengths in tokens, i64[n] byte pointers into the
.bin file, i64[m] first sequence of each document.
"""

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.indexed.paths import bin_path, idx_path
from tokamake.errors import UserError

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK = 1 << 20
_FLUSH_BYTES = 32 << 20


def token_dtype(vocab_size: int) -> type[np.integer]:
    """Return Megatron's token type: uint16 for fewer than 65,500 vocabulary entries, else int32."""
    return np.uint16 if vocab_size < 65_500 else np.int32


class IndexWriter:
    """Write an .idx file from documents in order, in constant memory.

    `add` writes lengths to their final position. `finish` reads them back and derives the byte
    pointers, because pointers are stored after all lengths.
    """

    def __init__(self, path: Path, dtype: type[np.integer]) -> None:
        self.sequences = self.documents = self.tokens = 0
        self._dtype = dtype
        self._stream = path.open("w+b")
        self._stream.write(bytes(HEADER.size))  # `finish` fills in the header
        # Number of sequences of each document. The file has no name: a killed job leaves no trace.
        self._counts = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115

    def add(self, lengths: npt.NDArray[np.integer], counts: npt.NDArray[np.integer]) -> None:
        """Append (sequences,) tokens of each sequence, and (documents,) sequences of each."""
        self._stream.write(lengths.astype("<i4", copy=False).data)
        self._counts.write(counts.astype("<i4", copy=False).data)
        self.sequences += len(lengths)
        self.documents += len(counts)
        self.tokens += int(lengths.sum(dtype=np.int64))

    def finish(self) -> None:
        """Write the byte pointers, the document bounds and, last, the header."""
        itemsize = np.dtype(self._dtype).itemsize
        start = 0
        for lengths in _chunks(self._stream, HEADER.size, self.sequences):
            ends = start + lengths.cumsum(dtype=np.int64)
            self._stream.write(((ends - lengths) * itemsize).astype("<i8", copy=False).data)
            start = int(ends[-1])
        assert start == self.tokens
        bound = np.zeros(1, np.int64)
        self._stream.write(bound.data)
        for counts in _chunks(self._counts, 0, self.documents):
            bounds = bound[-1] + counts.cumsum(dtype=np.int64)
            self._stream.write(bounds.astype("<i8", copy=False).data)
            bound = bounds
        assert bound[-1] == self.sequences
        code = _CODES[self._dtype]
        self._stream.seek(0)
        self._stream.write(HEADER.pack(MAGIC, 1, code, self.sequences, self.documents + 1))

    def __enter__(self) -> "IndexWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        self._counts.close()


def _chunks(stream: IO[bytes], offset: int, count: int) -> Iterator[npt.NDArray[np.int32]]:
    """Yield `count` int32 numbers from `offset` on, about a million at a time."""
    stream.flush()
    # pread leaves the file position alone, so the caller can append to the same file meanwhile.
    for first in range(0, count, _CHUNK):
        size = 4 * min(_CHUNK, count - first)
        yield np.frombuffer(os.pread(stream.fileno(), size, offset + 4 * first), "<i4")


class DatasetWriter:
    """Write an indexed dataset from documents in order, in constant memory.

    Use it as a context manager over temporary paths. The index is complete only after the block
    ends without an error.
    """

    def __init__(self, bin_file: Path, idx_file: Path, *, dtype: type[np.integer]) -> None:
        self.sha256 = hashlib.sha256()
        self._stream = bin_file.open("wb", buffering=0)
        self._dtype = dtype
        self._flushed = self._written = 0
        self.index = IndexWriter(idx_file, dtype)

    def add(
        self,
        tokens: npt.NDArray[np.integer],
        lengths: npt.NDArray[np.integer],
        counts: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Append documents: all tokens, concatenated, and numbers as for `IndexWriter.add`.

        Without `counts`, each document has one sequence.
        """
        content = np.ascontiguousarray(tokens, self._dtype).data.cast("B")
        self.sha256.update(content)
        self._written += len(content)
        while content:  # an unbuffered write may be partial
            content = content[self._stream.write(content) :]
        if self._written - self._flushed >= _FLUSH_BYTES:
            self._flush()
        self.index.add(lengths, np.ones(len(lengths), np.int32) if counts is None else counts)

    def _flush(self) -> None:
        """Ask the kernel to start writing dirty pages, without waiting for the disk.

        The fsync at the end of a large file then has little left to do.
        """
        if hasattr(os, "posix_fadvise"):
            # On Linux, DONTNEED starts the write-back of dirty pages in this range.
            size = self._written - self._flushed
            os.posix_fadvise(self._stream.fileno(), self._flushed, size, os.POSIX_FADV_DONTNEED)
        self._flushed = self._written

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.index.finish()
                written = self._stream.tell()
                assert written == self.index.tokens * np.dtype(self._dtype).itemsize
        finally:
            self._stream.close()
            self.index.__exit__()


class IndexedDataset:
    """An indexed dataset, memory-mapped for reading.

    Attributes:
        lengths: (sequences,) int32 tokens of each sequence.
        pointers: (sequences,) int64 byte offset of each sequence in the .bin file.
        document_bounds: (documents + 1,) int64 first sequence of each document, then their number.
        tokens: (total tokens,) all tokens of the .bin file.
    """

    def __init__(self, prefix: Path) -> None:
        idx, binary = idx_path(prefix), bin_path(prefix)
        for path in (idx, binary):
            if not path.is_file():
                raise UserError(
                    f"{path}: no such file; fix the prefix, the path without .bin and .idx"
                )
        code, sequences, bounds = read_header(idx)
        self.dtype = _token_type(idx, code)
        raw = _csrc.map_file(idx)
        offset = HEADER.size
        self.lengths = _view(raw, offset, dtype=np.int32, count=sequences)
        self.pointers = _view(raw, offset + 4 * sequences, dtype=np.int64, count=sequences)
        self.document_bounds = _view(raw, offset + 12 * sequences, dtype=np.int64, count=bounds)
        size, itemsize = binary.stat().st_size, np.dtype(self.dtype).itemsize
        expected = int(self.lengths.sum(dtype=np.int64)) * itemsize
        if size != expected:
            raise UserError(
                f"{binary}: {size} bytes, but its index counts {expected}; rebuild the dataset"
            )
        self.tokens: npt.NDArray[np.integer] = _csrc.map_file(binary).view(self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[np.integer]:
        start = int(self.pointers[sequence]) // np.dtype(self.dtype).itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]


def read_header(path: Path) -> tuple[int, int, int]:
    """Return dtype code, number of sequences n and number of document bounds m of an .idx file."""
    with path.open("rb") as stream:
        head = stream.read(HEADER.size)
    if head.startswith(b"TNTIDX"):
        raise UserError(f"{path}: a cached or lazy index (TNTIDX); `tokamake merge` converts it")
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise UserError(f"{path}: not a Megatron index (MMIDIDX); {index_remedy(path)}")
    _, version, code, sequences, bounds = HEADER.unpack(head)
    if version != 1:
        raise UserError(f"{path}: version {version} is not a known token format")
    expected = HEADER.size + 12 * sequences + 8 * bounds
    if path.stat().st_size != expected:
        raise UserError(
            f"{path}: {path.stat().st_size} bytes, its header says {expected}; {index_remedy(path)}"
        )
    return code, sequences, bounds


def index_remedy(idx: Path) -> str:
    """Return the remedy for an unreadable index, for an error message."""
    prefix = idx.with_suffix("")
    return (
        "rebuild the dataset, or split the tokens at each EOD token: remove the index and run "
        f"`tokamake repair {prefix} --eod ID --dtype DTYPE --output NEW`"
    )


def _token_type(path: Path, code: int) -> type[np.integer]:
    if code not in DTYPES:
        remedy = "; `tokamake merge` converts floating-point tokens" if code in (6, 7) else ""
        raise UserError(f"{path}: dtype code {code} is not a known token format{remedy}")
    return DTYPES[code]


def _view(raw: npt.NDArray[np.uint8], start: int, *, dtype: type, count: int) -> npt.NDArray:
    return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)
