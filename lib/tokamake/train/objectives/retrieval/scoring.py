"""Places of the positive passages among all passages of a file.

Shape suffixes: N questions, C passages of each, D width, M different passages, P positives.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokamake.train.objectives.retrieval.rows import NO_PASSAGE

TOPK = (1, 5, 20)
_QUESTIONS = 1024
"""Questions that are scored together."""


def places_of_positives(
    vectors: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """(N,) place of each question's positive among the passages of all questions, from 1.

    Equal passages count once. Other positives of the question do not count.

    Args:
        vectors: (N, 1 + C, D) of each question, then of its passages.
        labels: (N, C + P) see `QuestionBatch`.
    """
    num_passages = vectors.shape[1] - 1
    numbers, first = np.unique(labels[:, :num_passages], return_index=True)
    is_passage = numbers != NO_PASSAGE
    flat = vectors[:, 1:].reshape(-1, vectors.shape[2])
    passages_MD = torch.from_numpy(flat[first[is_passage]])
    numbers_M = torch.from_numpy(numbers[is_passage])
    queries_ND, labels_N = torch.from_numpy(vectors[:, 0]), torch.from_numpy(labels)
    places = []
    for queries, chosen in zip(
        queries_ND.split(_QUESTIONS), labels_N.split(_QUESTIONS), strict=True
    ):
        scores = queries @ passages_MD.T
        own = chosen[:, :1].contiguous()
        of_own = scores.gather(1, torch.searchsorted(numbers_M, own))
        hidden = is_any_of(numbers_M, chosen[:, num_passages:])
        hidden &= numbers_M != own
        places.append(((scores >= of_own) & ~hidden).sum(1))
    result: npt.NDArray[np.int64] = torch.cat(places).numpy()
    return result


def is_any_of(numbers_M: Tensor, positives_NP: Tensor) -> Tensor:
    """(N, M) whether a passage is a positive of a question."""
    found = torch.zeros(
        (len(positives_NP), len(numbers_M)), dtype=torch.bool, device=numbers_M.device
    )
    for positives_N in positives_NP.T:  # one by one, for less memory
        found |= positives_N[:, None] == numbers_M
    return found


def scores_of_places(places: npt.NDArray[np.int64]) -> dict[str, float]:
    """Mean reciprocal rank, share of places up to k, and mean place."""
    within = {f"accuracy_at_{k}": float(np.mean(places <= k)) for k in TOPK}
    return {
        "mean_reciprocal_rank": float(np.mean(1 / places)),
        **within,
        "average_rank": float(np.mean(places)),
    }
