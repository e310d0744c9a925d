"""Small folders of embeddings."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.retrieval.embeddings import new_shard


def random_vectors(number: int, *, dimension: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((number, dimension), dtype=np.float32)


def write_embeddings(
    folder: Path,
    vectors: npt.NDArray[np.float32],
    *,
    shards: int = 1,
    name: str = "e",
    first_id: int = 0,
    **made_from: Any,
) -> Path:
    """Write vectors (n, d) to shards of a folder; ids count from `first_id`."""
    ids = np.arange(first_id, first_id + len(vectors))
    for number, rows in enumerate(np.array_split(np.arange(len(vectors)), shards)):
        manifest = folder / f"{name}-{number}.json"
        with new_shard(manifest, dimension=vectors.shape[1], made_from=made_from) as shard:
            shard.append(ids[rows], vectors[rows])
    return folder
