"""Time index-blocks and search against FAISS alone, on drawn vectors.

    python benchmarks/searching.py --vectors 1000000 --dimension 64 --work /scratch

FAISS alone gets all vectors in memory as fp32. The stages read fp16 shards from disk, and write
indexes and results with hashes. Both train on the same sample with one thread, and take turns,
round by round. Figures are medians.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from faiss_alone import NPROBE, Clusters, Times, read_options, search_alone, seconds, take_turns

from tokamake.retrieval.embeddings import new_shard, open_embeddings
from tokamake.retrieval.found import read_found
from tokamake.retrieval.index_blocks import index_blocks
from tokamake.retrieval.search import search

_SHARD = 250_000
_TOP_K = 20


def main() -> None:
    """Measure and print a table."""
    options = read_options(__doc__, "vectors")
    options.work.mkdir(parents=True, exist_ok=True)
    folder = write_vectors(options)
    take_turns(folder, options, with_stages=with_stages, with_faiss=with_faiss)


def write_vectors(options: argparse.Namespace) -> Path:
    """Write vectors of clusters as shards, and queries near some of them."""
    clusters = Clusters(0, options.dimension)
    folder: Path = options.work / "vectors"
    for start in range(0, options.vectors, _SHARD):
        number = min(_SHARD, options.vectors - start)
        manifest = folder / f"{start:09}.json"
        with new_shard(manifest, dimension=options.dimension, made_from={}) as shard:
            shard.append(np.arange(start, start + number), clusters.draw(number))
    np.save(options.work / "queries.npy", clusters.draw(options.queries))
    return folder


def with_stages(folder: Path, options: argparse.Namespace) -> dict[str, Times]:
    """Seconds of the two stages."""
    index, found = options.work / "index.json", options.work / "found.json"
    for path in (index, found):
        path.unlink(missing_ok=True)
    sample = {"factory": options.factory, "train_vectors": options.train_vectors}
    queries = options.work / "queries.npy"
    limits = {"top_k": _TOP_K, "nprobe": NPROBE}
    return {
        "train and add tokamake": seconds(lambda: index_blocks(folder, output=index, **sample)),
        "search tokamake": seconds(
            lambda: search(queries=queries, index=index, output=found, **limits)
        ),
    }


def with_faiss(folder: Path, options: argparse.Namespace) -> dict[str, Times]:
    """Seconds of FAISS, with vectors and index in memory."""
    store = open_embeddings(folder)
    vectors = store.take(np.arange(store.num_vectors))
    queries = np.load(options.work / "queries.npy")
    times, ids = search_alone(vectors, queries, options, top_k=_TOP_K)
    check_alike(ids, options.work / "found.json")
    return times


def check_alike(ids: Any, manifest: Path) -> None:
    """Compare the passages found with the stages' result, if there is one."""
    if manifest.exists():
        same = float((read_found(manifest)[0].ids == ids).mean())
        assert same > 0.999, f"{same:.1%} of the ids are the same"


if __name__ == "__main__":
    main()
