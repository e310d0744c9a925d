"""The largest scores of each query, block by block of the corpus; ties go to the earlier one."""

import numpy as np
import numpy.typing as npt

from tokamake.retrieval.embeddings import Embeddings, Ids, Vectors

_QUERIES, _ROWS = 256, 8192
"""Rows of the two blocks whose inner products are computed at once: 8 MiB of scores."""


class TopK:
    """The k largest scores of each query so far, in order, with their positions.

    `scores` (queries, k), fp32, and `positions`, int64; -inf and -1 where there is none.
    """

    def __init__(self, num_queries: int, k: int) -> None:
        self.scores = np.full((num_queries, k), -np.inf, np.float32)
        self.positions = np.full((num_queries, k), -1, np.int64)

    def update(self, scores: npt.NDArray[np.float32], *, queries: slice, start: int) -> None:
        """Take further scores (q, n) of some queries: of the positions from `start` on."""
        best, positions = self.scores[queries], self.positions[queries]
        num_queries, k = best.shape
        # A later position must have a larger score.
        is_candidate = scores > best[:, -1:]
        if scores.shape[1] > k and np.count_nonzero(is_candidate) > 4 * best.size:
            is_candidate &= scores >= np.partition(scores, -k, axis=1)[:, -k, None]
        rows, columns = np.nonzero(is_candidate)
        if not len(rows):
            return
        all_rows = np.concatenate([np.repeat(np.arange(num_queries), k), rows])
        all_scores = np.concatenate([best.ravel(), scores[rows, columns]])
        all_positions = np.concatenate([positions.ravel(), columns + start])
        order = np.lexsort((all_positions, -all_scores, all_rows))
        counts = np.bincount(all_rows, minlength=num_queries)
        first = order[(np.cumsum(counts) - counts)[:, None] + np.arange(k)]
        self.scores[queries], self.positions[queries] = all_scores[first], all_positions[first]

    def ids(self, ids: Ids) -> Ids:
        """(queries, k) ids, of all `ids` (n,) in the order of positions; -1 where there is none."""
        found: Ids = np.where(self.positions < 0, -1, ids[self.positions])
        return found


def exact_top_k(queries: Vectors, embeddings: Embeddings, *, k: int) -> TopK:
    """Compare queries (q, d) with all embeddings by their inner products.

    Each vector is read once. Memory beside the queries and the result does not grow with either.
    """
    top = TopK(len(queries), k)
    start = 0
    for vectors in embeddings.blocks(_ROWS):
        for first in range(0, len(queries), _QUERIES):
            part = slice(first, first + _QUERIES)
            top.update(queries[part] @ vectors.T, queries=part, start=start)
        start += len(vectors)
    return top
