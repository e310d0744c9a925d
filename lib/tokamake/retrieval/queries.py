"""Vectors of queries: a folder of embeddings, or a .npy file."""

from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from tokamake import files
from tokamake.errors import UserError
from tokamake.retrieval.embeddings import Ids, Vectors, open_embeddings

_LARGEST_SUM = 2.0**100
"""Largest sum of the absolute values of a query; with a larger one, scores could overflow.

fp32 ends at 2^128. Vectors are below 2^16 in fp16, and the rotation of an index multiplies this by
the root of their dimension at most.
"""


class Queries(NamedTuple):
    """Queries in memory."""

    ids: Ids
    vectors: Vectors
    facts: dict[str, Any]
    """Hashes of the files, and what made them."""


def open_queries(path: Path) -> Queries:
    """Read queries; rows of a .npy file have their numbers, from 0, as ids."""
    if path.is_dir():
        store = open_embeddings(path)
        vectors = store.take(np.arange(store.num_vectors))
        return Queries(store.ids, vectors, store.facts)
    try:
        array = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a folder of embeddings, or a .npy") from None
    except (ValueError, EOFError, BadZipFile) as error:
        raise UserError(f"{path}: not a .npy file ({error}); write it with numpy.save") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise UserError(f"{path}: an archive of arrays, not a .npy file; write it with numpy.save")
    if array.ndim != 2 or array.dtype.kind != "f" or not array.size:
        raise UserError(
            f"{path}: {array.dtype} of shape {array.shape}; give vectors (n, d) of a float type"
        )
    with np.errstate(over="ignore"):
        vectors = array.astype(np.float32)
    if not (finite := np.isfinite(vectors).all(axis=1)).all():
        raise UserError(f"{path}: row {np.argmin(finite)} is not finite; fix the vector")
    if (is_large := np.abs(vectors).sum(axis=1, dtype=np.float64) > _LARGEST_SUM).any():
        row = np.argmax(is_large)
        raise UserError(
            f"{path}: row {row} has values up to {np.abs(vectors[row]).max():.3g}, so that scores "
            "could overflow; normalize the vector"
        )
    facts = {"sha256": files.sha256(path), "made_from": {}}
    return Queries(np.arange(len(vectors)), vectors, facts)
