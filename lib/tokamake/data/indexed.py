"""Megatron's indexed dataset: a .bin file of raw tokens and an .idx file of sequence bounds.

Tokens come from `tokenize` and `merge`; the sample indexes and the loader read them memory-mapped.
Format (little-endian): magic `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 sequences n,
u64 m = documents + 1, i32[n] lengths, i64[n] byte pointers, i64[m] document bounds.
"""

import struct
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tokamake.data.pairs import bin_path, idx_path
from tokamake.errors import UserError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def token_dtype(vocab_size: int) -> type[np.integer]:
    """Megatron's choice of token type: uint16 below 65,500 entries, else int32."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def write_index(
    path: Path,
    *,
    dtype: type[np.integer],
    lengths: npt.NDArray[np.int32],
    document_bounds: npt.NDArray[np.int64],
) -> None:
    """Write an .idx: `lengths` (n,) in tokens, `document_bounds` (documents + 1,) in sequences."""
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= np.dtype(dtype).itemsize
    header = _HEADER.pack(_MAGIC, 1, _CODES[dtype], len(lengths), len(document_bounds))
    with path.open("wb") as stream:
        stream.write(header)
        stream.write(lengths.astype("<i4", copy=False).tobytes())
        stream.write(pointers.astype("<i8", copy=False).tobytes())
        stream.write(document_bounds.astype("<i8", copy=False).tobytes())


class Writer:
    """Writes a pair document by document, one sequence each; memory grows by 4 bytes a document.

    Use as a context manager over temporary paths: the index is written on leaving without error.
    """

    def __init__(self, bin_file: Path, idx_file: Path, dtype: type[np.integer]) -> None:
        self._stream = bin_file.open("wb")
        self._idx_file = idx_file
        self._dtype = dtype
        self._lengths: list[npt.NDArray[np.int32]] = []

    def add(self, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.int32]) -> None:
        """Append a batch of documents: `tokens` (sum of lengths,), `lengths` (documents,)."""
        self._stream.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._lengths.append(lengths.astype(np.int32, copy=False))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()
        if kind is None:
            lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int32)
            bounds = np.arange(len(lengths) + 1, dtype=np.int64)
            write_index(self._idx_file, dtype=self._dtype, lengths=lengths, document_bounds=bounds)


class IndexedDataset:
    """A pair opened for reading, memory-mapped.

    Attributes:
        dtype: token type.
        lengths: (sequences,) int32, tokens per sequence.
        pointers: (sequences,) int64, byte offsets into the .bin file.
        document_bounds: (documents + 1,) int64, first sequence of each document, last = sequences.
        tokens: (total tokens,) memory map of the .bin file.

    Raises:
        UserError: a file is missing, not an index, or the two disagree in size.
    """

    def __init__(self, prefix: Path) -> None:
        idx, binary = idx_path(prefix), bin_path(prefix)
        for path in (idx, binary):
            if not path.is_file():
                raise UserError(
                    f"{path}: no such file; make it with `tokamake tokenize` or `merge`"
                )
        self.dtype, sequences, bounds = _read_header(idx)
        raw = np.memmap(idx, mode="r") if idx.stat().st_size else np.zeros(0, np.uint8)
        offset = _HEADER.size
        self.lengths = _view(raw, offset, np.int32, sequences)
        self.pointers = _view(raw, offset + 4 * sequences, np.int64, sequences)
        self.document_bounds = _view(raw, offset + 12 * sequences, np.int64, bounds)
        size, itemsize = binary.stat().st_size, np.dtype(self.dtype).itemsize
        expected = int(self.lengths.sum(dtype=np.int64)) * itemsize
        if size != expected:
            raise UserError(
                f"{binary}: {size} bytes, but its index counts {expected}; make the pair again"
            )
        self.tokens: npt.NDArray[np.integer] = (
            np.memmap(binary, mode="r", dtype=self.dtype) if size else np.zeros(0, self.dtype)
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[np.integer]:
        start = int(self.pointers[sequence]) // np.dtype(self.dtype).itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]


def _read_header(path: Path) -> tuple[type[np.integer], int, int]:
    with path.open("rb") as stream:
        head = stream.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise UserError(f"{path}: not a Megatron index (MMIDIDX); make the pair again")
    _, version, code, sequences, bounds = _HEADER.unpack(head)
    if version != 1 or code not in _DTYPES:
        raise UserError(f"{path}: version {version}, dtype code {code} are not known token formats")
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    if path.stat().st_size != expected:
        raise UserError(
            f"{path}: {path.stat().st_size} bytes, its header says {expected}; make the pair again"
        )
    return _DTYPES[code], sequences, bounds


def _view(raw: npt.NDArray[np.uint8], start: int, dtype: type, count: int) -> npt.NDArray:
    return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)
