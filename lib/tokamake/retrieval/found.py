"""Results of a search: ids and scores of the passages that each query found, best first."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.retrieval.embeddings import map_array
from tokamake.retrieval.products import data_path, new_product, read_product

KIND = "found passages"
_QUERIES, _IDS, _SCORES = ".queries.npy", ".ids.npy", ".scores.npy"
_SUFFIXES = (_QUERIES, _IDS, _SCORES)


class Found(NamedTuple):
    """Results of a search of n queries for k passages each."""

    queries: npt.NDArray[np.int64]
    """(n,) ids of the queries; for questions, their places in the file, from 0."""
    ids: npt.NDArray[np.int64]
    """(n, k) ids of passages; -1 at the end of a row that found fewer."""
    scores: npt.NDArray[np.float32]
    """(n, k); -inf where the id is -1."""


def write_found(manifest: Path, found: Found, *, facts: dict[str, Any]) -> None:
    """Write the arrays NAME.queries.npy, NAME.ids.npy and NAME.scores.npy, then NAME.json."""
    num_queries, k = found.ids.shape
    facts = {"num_queries": num_queries, "top_k": k, **facts}
    with new_product(manifest, kind=KIND, suffixes=_SUFFIXES, facts=facts) as product:
        arrays: list[npt.NDArray[Any]] = [found.queries, found.ids, found.scores]
        for suffix, array in zip(_SUFFIXES, arrays, strict=True):
            with product.paths[suffix].open("wb") as file:
                np.save(file, array)


def read_found(manifest: Path) -> tuple[Found, dict[str, Any]]:
    """Open the results of a search, memory-mapped, and the facts of their manifest."""
    facts = read_product(manifest, KIND, remedy="search again")
    shape = (facts["num_queries"], facts["top_k"])
    queries = map_array(data_path(manifest, _QUERIES), dtype="int64", shape=shape[:1])
    ids = map_array(data_path(manifest, _IDS), dtype="int64", shape=shape)
    scores = map_array(data_path(manifest, _SCORES), dtype="float32", shape=shape)
    return Found(queries, ids, scores), facts
