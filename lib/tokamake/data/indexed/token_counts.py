"""How many tokens a pair holds, told without reading it: thousands of pairs take no second.

Sizes come from the manifest, or the ends of the index; `lint_weights` asks.
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
    """Tokens of a pair.

    Raises:
        UserError: a file is missing, or the .bin file has another size than the manifest or the
            index says.
    """
    missing = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if missing:
        raise UserError(f"no {' and no '.join(missing)}; check the prefix and --data-root")
    size = bin_path(prefix).stat().st_size
    stated = _stated(manifest_path(prefix))
    if stated is None:
        return _of_index(prefix, size)
    tokens, expected = stated
    if size != expected:
        raise UserError(
            f"{bin_path(prefix)}: {size} bytes, its manifest says {expected}; make the pair again"
        )
    return tokens


def count_documents_tokens(prefix: Path, choose: Callable[[int], range]) -> int:
    """Tokens of some sequences of a pair, which `choose` names when it knows how many there are.

    Raises:
        UserError: as of `count_tokens`.
    """
    count_tokens(prefix)
    lengths = IndexedDataset(prefix).lengths
    chosen = choose(len(lengths))
    return int(lengths[chosen.start : chosen.stop].sum(dtype=np.int64))


def _stated(manifest: Path) -> tuple[int, int] | None:
    """Tokens and bytes of the .bin file by the manifest; a file of its name may be another's."""
    if not manifest.is_file():
        return None
    found = files.read_json(manifest, "make the pair again")
    try:
        return int(found["tokens"]), int(found["bytes"]["bin"])
    except (KeyError, TypeError, ValueError):
        return None


def _of_index(prefix: Path, size: int) -> int:
    """Where the last sequence ends with the .bin file, its size tells; else all lengths do."""
    code, sequences, _ = read_header(idx_path(prefix))
    if code in DTYPES and sequences:
        itemsize = np.dtype(DTYPES[code]).itemsize
        if _end(idx_path(prefix), sequences, itemsize) == size:
            return size // itemsize
    return int(IndexedDataset(prefix).lengths.sum(dtype=np.int64))


def _end(path: Path, sequences: int, itemsize: int) -> int:
    """Byte at which the last sequence ends by its pointer and length."""
    pointers = HEADER.size + 4 * sequences
    with path.open("rb", buffering=0) as stream:
        (length,) = struct.unpack("<i", os.pread(stream.fileno(), 4, pointers - 4))
        last = pointers + 8 * (sequences - 1)
        (pointer,) = struct.unpack("<q", os.pread(stream.fileno(), 8, last))
    return int(pointer + length * itemsize)
