"""Search for the neighbors of chunks of samples, in blocks of samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.lib.format
import numpy.typing as npt

from tokamake.errors import UserError
from tokamake.retrieval.chunk_vectors import SAME, has_vectors
from tokamake.retrieval.embeddings import open_embeddings
from tokamake.retrieval.products import new_product
from tokamake.retrieval.searched import SearchedIndex
from tokamake.train.objectives.retro.chunks import ChunkDatabase, Numbers
from tokamake.train.objectives.retro.samples import NEIGHBORS, ChunkedSamples

_QUERIES = 1 << 15
"""Chunks that are searched together, before their neighbors are filtered."""


class ChunkQueries:
    """Vectors of the chunks of a dataset's samples.

    Attributes:
        num_samples: samples of the dataset.
        num_chunks: C, chunks of a sample.
        samples_digest: digest of everything that decides the samples.
        facts: hashes of the vectors.
    """

    def __init__(
        self,
        folder: Path,
        samples: ChunkedSamples,
        *,
        number: int | None,
        searched: SearchedIndex,
    ) -> None:
        """Open the vectors, and check that they are of these samples.

        Args:
            number: of the dataset in the samples; None: they have none of it.
        """
        self._samples, self._number = samples, number
        self.num_chunks = samples.num_chunks
        self.num_samples = 0 if number is None else samples.num_drawn(number)
        self.samples_digest = "" if number is None else samples.samples_digest(number)
        self._embeddings = open_embeddings(folder) if has_vectors(folder) else None
        self.facts: list[Any] = []
        if self._embeddings is None:
            return
        self.facts = self._embeddings.facts["shards"]
        made_from = self._embeddings.facts["made_from"]
        if made_from.get("samples") != self.samples_digest:
            raise UserError(
                f"{folder}: vectors of other samples than {samples.split} has; run `tokamake "
                "embed-samples` again"
            )
        of_chunks = searched.facts["embeddings"]["made_from"]
        for name in SAME:
            if made_from.get(name) != of_chunks.get(name):
                raise UserError(
                    f"{folder}: made with another {name} than {searched.path}; embed both with "
                    "one model"
                )

    def search(self, places: range, searched: SearchedIndex, *, num_found: int) -> Numbers:
        """(samples, C, found) chunks that are similar to the chunks of some samples, or -1."""
        found = np.full((len(places) * self.num_chunks, num_found), -1, np.int64)
        if self._embeddings is not None:
            first, stop = places.start * self.num_chunks, places.stop * self.num_chunks
            ids = self._embeddings.ids
            positions = np.arange(*np.searchsorted(ids, [first, stop]))
            vectors = self._embeddings.take(positions)
            found[ids[positions] - first] = searched.find(vectors, k=num_found)[0]
        return found.reshape(len(places), self.num_chunks, num_found)

    def own_documents(self, places: range, database: ChunkDatabase) -> list[Numbers]:
        """Documents of each sample, by their numbers among all documents that are searched."""
        assert self._number is not None, "there are samples"
        first = database.first_document(self._samples.prefix(self._number))
        if first is None:  # a dataset of another split
            return [np.zeros(0, np.int64)] * len(places)
        return [first + self._samples.documents(self._number, place) for place in places]


def keep_nearest(
    found: Numbers,
    documents: Callable[[Numbers], Numbers],
    *,
    own: list[Numbers],
    num_documents: int,
    num_kept: int,
) -> Numbers:
    """Keep the first chunks that are of no document of their sample.

    Args:
        found: (samples, C, n) chunks, the most similar ones first; -1: none.
        documents: function that returns the documents of chunks.
        own: documents of each sample.
        num_documents: documents of all chunks.
        num_kept: K, chunks to keep.

    Returns:
        (samples, C, K) chunks; -1 where there are fewer.
    """
    num_samples, num_chunks, num_found = found.shape
    rows = found.reshape(-1, num_found)
    kept = np.full((len(rows), num_kept), -1, np.int64)
    # Document d of sample s is the pair s x documents + d.
    pairs = np.unique(
        np.concatenate([sample * num_documents + each for sample, each in enumerate(own)])
    )
    firsts = np.repeat(np.arange(num_samples) * num_documents, num_chunks)
    left = np.arange(len(rows))
    # Few are dropped: mostly, the first ones are enough.
    for width in (min(2 * num_kept, num_found), num_found):
        part = rows[left, :width]
        is_dropped = (part < 0) | _occur(documents(part) + firsts[left, None], pairs)
        order = np.argsort(is_dropped, axis=1, kind="stable")[:, :num_kept]
        nearest = np.take_along_axis(part, order, axis=1)
        nearest[np.take_along_axis(is_dropped, order, axis=1)] = -1
        kept[left] = nearest
        left = left[np.count_nonzero(~is_dropped, axis=1) < num_kept]
    return kept.reshape(num_samples, num_chunks, num_kept)


def _occur(values: Numbers, among: Numbers) -> npt.NDArray[np.bool_]:
    """Whether each value is among sorted ones."""
    if not len(among):
        return np.zeros(values.shape, np.bool_)
    places = np.minimum(np.searchsorted(among, values), len(among) - 1)
    occurs: npt.NDArray[np.bool_] = among[places] == values
    return occurs


def write_neighbors(
    manifest: Path,
    asked: ChunkQueries,
    *,
    database: ChunkDatabase,
    searched: SearchedIndex,
    facts: dict[str, Any],
    kind: str,
) -> int:
    """Write the neighbors of all chunks; return the number of chunks without any."""
    num_alone, num_kept = 0, facts["num_kept"]
    step = max(1, _QUERIES // asked.num_chunks)
    shape = (asked.num_samples, asked.num_chunks, num_kept)
    facts = {**facts, "num_samples": asked.num_samples}
    with (
        new_product(manifest, kind=kind, suffixes=(NEIGHBORS,), facts=facts) as product,
        product.paths[NEIGHBORS].open("wb") as file,
    ):
        header = {"descr": "<i8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, asked.num_samples, step):
            places = range(start, min(start + step, asked.num_samples))
            found = asked.search(places, searched, num_found=facts["num_found"])
            kept = keep_nearest(
                found,
                database.documents,
                own=asked.own_documents(places, database),
                num_documents=database.num_documents,
                num_kept=num_kept,
            )
            num_alone += int((kept[..., 0] < 0).sum())
            file.write(np.ascontiguousarray(kept, "<i8").data)
    return num_alone
