"""Number of tokens in an indexed dataset, without reading its tokens or the whole index.

Thousands of datasets take less than a second. `lint_weights` uses it.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tokamake import files
from tokamake.data.indexed.dataset import DTYPES, HEADER, IndexedDataset, read_header
from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path
from tokamake.errors import UserError


def count_tokens(prefix: Path) -> int:
    """Return the number of tokens in a dataset."""
    missing = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if missing:
        raise UserError(f"no {' and no '.join(missing)}; check the prefix and --data-root")
    size = bin_path(prefix).stat().st_size
    counts = _manifest_counts(manifest_path(prefix))
    if counts is None:
        return _count_by_index(prefix, size)
    tokens, expected = counts
    if size != expected:
        raise UserError(
            f"{bin_path(prefix)}: {size} bytes, its manifest says {expected}; rebuild the dataset"
        )
    return tokens


def count_documents_tokens(prefix: Path, choose: Callable[[int], range]) -> int:
    """Return the number of tokens in the sequences that `choose` picks of all, by their number."""
    count_tokens(prefix)
    lengths = IndexedDataset(prefix).lengths
    sequences = choose(len(lengths))
    return int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))


def _manifest_counts(path: Path) -> tuple[int, int] | None:
    """Return tokens and .bin bytes that a manifest states; None if there is no manifest."""
    if not path.is_file():
        return None
    manifest = files.read_json(path, "rebuild the dataset")
    try:
        return int(manifest["tokens"]), int(manifest["bytes"]["bin"])
    except (KeyError, TypeError, ValueError):
        return None  # another program may write a .json file of this name


def _count_by_index(prefix: Path, size: int) -> int:
    """Count tokens with the index and the size of the .bin file in bytes."""
    code, sequences, _ = read_header(idx_path(prefix))
    if code in DTYPES and sequences:
        itemsize = np.dtype(DTYPES[code]).itemsize
        # Fast path: if the last sequence ends where the file ends, its size gives the count.
        if _last_sequence_end(idx_path(prefix), sequences, itemsize=itemsize) == size:
            return size // itemsize
    return int(IndexedDataset(prefix).lengths.sum(dtype=np.int64))


def _last_sequence_end(path: Path, sequences: int, *, itemsize: int) -> int:
    """Return the byte after the last sequence, by its pointer and length in the index."""
    pointers = HEADER.size + 4 * sequences
    with path.open("rb", buffering=0) as stream:
        (length,) = struct.unpack("<i", os.pread(stream.fileno(), 4, pointers - 4))
        last = pointers + 8 * (sequences - 1)
        (pointer,) = struct.unpack("<q", os.pread(stream.fileno(), 8, last))
    return int(pointer + length * itemsize)
