"""Where the numbers of an index file stand: MMIDIDX of every Megatron lineage, and TNTIDX.

`merge` and `repair` read columns from disk a million numbers at a time, whatever program made them.
TNTIDX (`cached` and `lazy`, little-endian): magic `TNTIDX\\0\\0`, u64 version 1, u64 dtype code,
u64 bytes a token, u64 sequences n, u64 sizes s, u64 document bounds m, i64[n + 1] first size of
each sequence, i64[n + 1] first token of each, i64[s] sizes, i64[m] document bounds.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.indexed.dataset import HEADER, again, read_header
from tokamake.errors import UserError

_TNTIDX = b"TNTIDX\0\0"
_TNT_HEADER = struct.Struct("<8sQQQQQQ")
_CHUNK = 1 << 20


class Column(NamedTuple):
    """Numbers of one kind in an index file."""

    path: Path
    """The index."""
    offset: int
    """Their first byte."""
    dtype: str
    """<i4 or <i8."""
    length: int
    """How many there are."""

    def read(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Read so many numbers from place `first` on, as int64."""
        with self.path.open("rb") as stream:
            stream.seek(self.offset + first * np.dtype(self.dtype).itemsize)
            return np.fromfile(stream, self.dtype, count).astype(np.int64, copy=False)

    def chunks(self, size: int = _CHUNK) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the numbers in order, at most `size` at a time, as int64."""
        for first in range(0, self.length, size):
            yield self.read(first, min(size, self.length - first))


class IndexLayout(NamedTuple):
    """What an index file says of the token file beside it."""

    code: int
    """Code of the token type: as in `indexed.DTYPES`, or 6 and 7 for floating-point numbers."""
    lengths: Column
    """(n,) tokens of each sequence."""
    starts: Column
    """(n,) first byte, or token, of each sequence."""
    bounds: Column
    """(m,) first sequence of each document, and n."""
    in_tokens: bool
    """Whether `starts` count tokens."""

    def tokens(self) -> int:
        """Sum of the lengths."""
        return sum(int(lengths.sum()) for lengths in self.lengths.chunks())


def read_layout(idx: Path) -> IndexLayout:
    """Find the columns of an index file.

    Raises:
        UserError: it is of no known kind, or its size is not what its header says.
    """
    with idx.open("rb") as stream:
        kind = stream.read(len(_TNTIDX))
    if kind == _TNTIDX:
        return _read_tntidx(idx)
    code, sequences, bounds = read_header(idx)
    at = HEADER.size
    return IndexLayout(
        code,
        Column(idx, at, "<i4", sequences),
        Column(idx, at + 4 * sequences, "<i8", sequences),
        Column(idx, at + 12 * sequences, "<i8", bounds),
        in_tokens=False,
    )


def _read_tntidx(idx: Path) -> IndexLayout:
    with idx.open("rb") as stream:
        head = stream.read(_TNT_HEADER.size)
    if len(head) < _TNT_HEADER.size:
        raise UserError(f"{idx}: cut off in its header; {again(idx)}")
    _, version, code, _, sequences, sizes, bounds = _TNT_HEADER.unpack(head)
    at, found = _TNT_HEADER.size, idx.stat().st_size
    expected = at + 8 * (2 * (sequences + 1) + sizes + bounds)
    if version != 1 or found != expected:
        raise UserError(
            f"{idx}: version {version}, {found} bytes; version 1 of its header has {expected} "
            f"bytes; {again(idx)}"
        )
    _check_flat(Column(idx, at, "<i8", sequences + 1), sizes)
    starts = at + 8 * (sequences + 1)
    lengths = starts + 8 * (sequences + 1)
    return IndexLayout(
        code,
        Column(idx, lengths, "<i8", sequences),
        Column(idx, starts, "<i8", sequences),
        Column(idx, lengths + 8 * sizes, "<i8", bounds),
        in_tokens=True,
    )


def _check_flat(first_sizes: Column, sizes: int) -> None:
    """A sequence of tokens has one size; arrays of more dimensions are not text."""
    first = 0
    for block in first_sizes.chunks():
        if not np.array_equal(block, np.arange(first, first + len(block))):
            break
        first += len(block)
    if first != first_sizes.length or sizes != first - 1:
        raise UserError(
            f"{first_sizes.path}: its arrays are not of one dimension, so they are no sequences of "
            f"tokens; {again(first_sizes.path)}"
        )
