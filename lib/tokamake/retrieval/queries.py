"""Vectors of queries: a folder of embeddings, or a .npy file."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokamake import files
from tokamake.errors import UserError
from tokamake.retrieval.embeddings import Ids, Vectors, open_embeddings


class Queries(NamedTuple):
    """Queries in memory."""

    ids: Ids
    vectors: Vectors
    facts: dict[str, Any]
    """Hashes of the files, and what made them."""


def open_queries(path: Path) -> Queries:
    """Read queries; those of a .npy file are numbered from 0."""
    if path.is_dir():
        store = open_embeddings(path)
        vectors = store.take(np.arange(store.num_vectors))
        return Queries(store.ids, vectors, store.facts)
    try:
        array = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a folder of embeddings, or a .npy") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: not a .npy file ({error}); write it with numpy.save") from None
    if array.ndim != 2 or array.dtype.kind != "f" or not array.size:
        raise UserError(
            f"{path}: {array.dtype} of shape {array.shape}; give vectors (n, d) of a float type"
        )
    vectors = array.astype(np.float32)
    if not (finite := np.isfinite(vectors).all(axis=1)).all():
        raise UserError(f"{path}: row {np.argmin(finite)} is not finite; fix the vector")
    facts = {"sha256": files.sha256(path), "made_from": {}}
    return Queries(np.arange(len(vectors)), vectors, facts)
