"""Columns of an index file: MMIDIDX of every Megatron lineage, and TNTIDX.

`merge` and `repair` read columns from disk about a million numbers at a time, so that memory does
not grow with the dataset. They read the files of other programs too.

Layout of TNTIDX (written by `--dataset-impl cached` and `lazy`; little-endian): magic
`TNTIDX\\0\\0`, u64 version 1, u64 dtype code, u64 bytes per token, u64 sequences n, u64 sizes s,
u64 document bounds m, i64[n + 1] first size of each sequence, i64[n + 1] first token of each
sequence, i64[s] sizes, i64[m] document bounds.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.indexed.dataset import HEADER, index_remedy, read_header
from tokamake.errors import UserError

_TNTIDX = b"TNTIDX\0\0"
_TNT_HEADER = struct.Struct("<8sQQQQQQ")
_CHUNK = 1 << 20
_SMALL = 1 << 16
"""Most bytes of an index to read at once: with thousands of small files, opening takes the time."""


class Column(NamedTuple):
    """An array of numbers in an index file."""

    path: Path
    offset: int
    """First byte of the array."""
    dtype: str
    length: int
    content: bytes = b""
    """The whole index file, if it was read at once."""

    def read(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Read up to `count` numbers from index `first` on, as int64."""
        offset = self.offset + first * np.dtype(self.dtype).itemsize
        count = max(0, min(count, self.length - first))
        if self.content:
            numbers = np.frombuffer(self.content, self.dtype, count, offset)
        else:
            numbers = np.fromfile(self.path, self.dtype, count, offset=offset)
        return numbers.astype(np.int64, copy=False)

    def chunks(self, size: int = _CHUNK) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the numbers in order, at most `size` at a time, as int64."""
        for first in range(0, self.length, size):
            yield self.read(first, min(size, self.length - first))


class IndexLayout(NamedTuple):
    """Columns of an index file, and the token type of the .bin file."""

    code: int
    """dtype code: a key of `dataset.DTYPES`, or 6 or 7 for floating-point tokens."""
    lengths: Column
    """(n,) number of tokens in each sequence."""
    starts: Column
    """(n,) first byte, or first token, of each sequence."""
    bounds: Column
    """(m,) first sequence of each document, then n."""
    in_tokens: bool
    """Whether `starts` counts tokens, not bytes."""

    @property
    def content(self) -> bytes:
        return self.lengths.content

    def tokens(self) -> int:
        return sum(int(lengths.sum()) for lengths in self.lengths.chunks())

    def sequence_counts(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the number of sequences in each document, for many documents at a time."""
        previous = np.zeros(0, np.int64)
        for bounds in self.bounds.chunks():
            yield np.diff(bounds, prepend=previous)
            previous = bounds[-1:]


def read_layout(idx: Path, *, at_once: bool = False) -> IndexLayout:
    """Find the columns of an index file; with `at_once`, keep the content of a small file."""
    with idx.open("rb", buffering=0) as stream:
        first = stream.read(_SMALL if at_once else len(_TNTIDX))
    if first.startswith(_TNTIDX):
        return _read_tntidx(idx)
    code, sequences, bounds = read_header(idx)
    offset = HEADER.size
    content = first if len(first) == offset + 12 * sequences + 8 * bounds else b""
    return IndexLayout(
        code,
        Column(idx, offset, "<i4", sequences, content),
        Column(idx, offset + 4 * sequences, "<i8", sequences, content),
        Column(idx, offset + 12 * sequences, "<i8", bounds, content),
        in_tokens=False,
    )


def _read_tntidx(idx: Path) -> IndexLayout:
    with idx.open("rb") as stream:
        header = stream.read(_TNT_HEADER.size)
    if len(header) < _TNT_HEADER.size:
        raise UserError(f"{idx}: truncated within its header; {index_remedy(idx)}")
    _, version, code, _, sequences, sizes, bounds = _TNT_HEADER.unpack(header)
    offset, file_bytes = _TNT_HEADER.size, idx.stat().st_size
    expected = offset + 8 * (2 * (sequences + 1) + sizes + bounds)
    if version != 1 or file_bytes != expected:
        raise UserError(
            f"{idx}: version {version}, {file_bytes} bytes; expected version 1 and, by its header, "
            f"{expected} bytes; {index_remedy(idx)}"
        )
    _check_one_dimension(Column(idx, offset, "<i8", sequences + 1), sizes)
    starts = offset + 8 * (sequences + 1)
    lengths = starts + 8 * (sequences + 1)
    return IndexLayout(
        code,
        Column(idx, lengths, "<i8", sequences),
        Column(idx, starts, "<i8", sequences),
        Column(idx, lengths + 8 * sizes, "<i8", bounds),
        in_tokens=True,
    )


def _check_one_dimension(first_sizes: Column, sizes: int) -> None:
    """Check that each sequence has exactly one size.

    TNTIDX can hold arrays of several dimensions (fairseq used it for features, not only text).
    """
    first = 0
    for chunk in first_sizes.chunks():
        if not np.array_equal(chunk, np.arange(first, first + len(chunk))):
            break
        first += len(chunk)
    if first != first_sizes.length or sizes != first - 1:
        raise UserError(
            f"{first_sizes.path}: its arrays have more than one dimension, so they are not "
            f"sequences of tokens; {index_remedy(first_sizes.path)}"
        )
