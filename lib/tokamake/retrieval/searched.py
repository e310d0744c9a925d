"""Vectors to search: embeddings, compared one by one, or an index of FAISS."""

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokamake.errors import UserError
from tokamake.retrieval import faiss_index
from tokamake.retrieval.embeddings import Ids, Vectors, open_embeddings
from tokamake.retrieval.products import data_path, read_product
from tokamake.retrieval.top_k import exact_top_k

INDEX_KIND = "an index"
INDEX_SUFFIX = ".faiss"
REMEDY = "build it with `tokamake index-blocks`"
_QUERIES = 1024
"""Queries that FAISS gets at once; a fixed number, so that their sums are rounded alike."""
_OPTIONS = {"nprobe": "--nprobe", "efSearch": "--ef-search"}

Result = tuple[Ids, npt.NDArray[np.float32]]
"""Ids (q, k) and scores (q, k), best first; -1 and -inf where fewer were found."""


class Searched(Protocol):
    """Vectors to search."""

    path: Path
    num_vectors: int
    dimension: int
    facts: dict[str, Any]
    """Facts that decide the result; `embeddings` has `made_from`."""

    def find(self, queries: Vectors, *, k: int) -> Result:
        """Find the k largest inner products with each query (q, d)."""


class SearchedEmbeddings:
    """All embeddings of a folder: an exact search."""

    def __init__(self, folder: Path, *, shards: Collection[str]) -> None:
        self.path, self._store = folder, open_embeddings(folder, shards=shards)
        self.num_vectors, self.dimension = self._store.num_vectors, self._store.dimension
        self.facts: dict[str, Any] = {"embeddings": self._store.facts}

    def find(self, queries: Vectors, *, k: int) -> Result:
        """Compare each query with each embedding; equal scores: the earlier one is first."""
        top = exact_top_k(queries, self._store, k=k)
        return top.ids(self._store.ids), top.scores


class SearchedIndex:
    """An index of FAISS."""

    def __init__(
        self,
        manifest: Path,
        *,
        parameters: dict[str, int],
        workers: int,
        uses_gpus: bool = False,
    ) -> None:
        """Open an index.

        Args:
            manifest: of `index-blocks`.
            parameters: of FAISS, by name.
            workers: threads; 0: all cores.
            uses_gpus: whether faiss-gpu, if it is installed, searches on all GPUs of the machine.
        """
        self._uses_gpus = uses_gpus
        facts = read_product(manifest, INDEX_KIND, remedy=REMEDY)
        self.path, self._workers = manifest, workers or faiss_index.usable_cores()
        self.num_vectors, self.dimension = facts["num_vectors"], facts["dimension"]
        self.facts: dict[str, Any] = {
            "embeddings": facts["embeddings"],
            "index": {"factory": facts["factory"], "hashes": facts["hashes"], **parameters},
        }
        self._parameters = parameters
        self._copies = dict[int, Any]()

    def find(self, queries: Vectors, *, k: int) -> Result:
        """Search the index, some queries at a time."""
        ids = np.empty((len(queries), k), np.int64)
        scores = np.empty((len(queries), k), np.float32)
        searched = self._on_gpus(k) if self._uses_gpus else self._index
        with faiss_index.num_threads(self._workers):
            for start in range(0, len(queries), _QUERIES):
                part = slice(start, start + _QUERIES)
                scores[part], ids[part] = searched.search(queries[part], k)
        scores[ids < 0] = -np.inf
        return ids, scores

    def _on_gpus(self, k: int) -> Any:
        """The index on GPUs, where there are any, for a search of k vectors."""
        if k not in self._copies:
            most = max(k, self._parameters.get("nprobe", 0))
            self._copies = {k: faiss_index.on_gpus(self._index, most=most)}
        return self._copies[k]

    @cached_property
    def _index(self) -> Any:
        index = faiss_index.read_index(data_path(self.path, INDEX_SUFFIX), remedy=REMEDY)
        for name, value in self._parameters.items():
            factory = self.facts["index"]["factory"]
            option = _OPTIONS[name]
            faiss_index.set_parameter(index, name, value=value, factory=factory, option=option)
        return index


def open_searched(
    index: Path | None,
    embeddings: Path | None,
    *,
    shards: Collection[str] = (),
    parameters: dict[str, int],
    workers: int,
) -> Searched:
    """Open an index, or without one, embeddings; refuse an index of other embeddings."""
    if index is None:
        if embeddings is None:
            raise UserError("--index and --embeddings: neither is given; give one of them")
        if parameters:
            option = _OPTIONS[next(iter(parameters))]
            raise UserError(f"{option}: without --index, the search is exact; leave the option out")
        return SearchedEmbeddings(embeddings, shards=shards)
    searched = SearchedIndex(index, parameters=parameters, workers=workers, uses_gpus=True)
    if embeddings:
        stored = open_embeddings(embeddings, shards=shards).facts["shards"]
        if stored != searched.facts["embeddings"]["shards"]:
            raise UserError(f"--index: {index} has other embeddings than {embeddings}; {REMEDY}")
    return searched
