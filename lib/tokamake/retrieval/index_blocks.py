"""Stage `index-blocks`: an index of FAISS for a folder of embeddings."""

from pathlib import Path
from typing import Any


def index_blocks(
    embeddings: Path,
    *,
    output: Path,
    shards: tuple[str, ...] = (),
    factory: str = "Flat",
    train_vectors: int = 0,
    seed: int = 1,
    workers: int = 0,
) -> None:
    """Build an index of FAISS for inner products: train it on a sample, add all vectors.

    The bytes of the index depend neither on the shards nor on the workers.

    Args:
        embeddings: folder of embeddings.
        output: manifest to write, NAME.json; the index is NAME.faiss beside it.
        shards: names of the shards to index; by default, all of the folder.
        factory: string of FAISS's index_factory, such as Flat, IVF1024,Flat, HNSW32 or
            IVF1024,PQ16.
        train_vectors: number of vectors to train on; 0: 256 for each centroid, at most all.
        seed: of the sample, and of k-means for lists and for codes (PQ). The rotation of OPQ is
            learned from the sample with FAISS's own seed.
        workers: threads that add vectors; 0: all cores. Training, and adding to a graph such as
            HNSW32, use one thread, because more of them could change the bytes.
    """
    from tokamake import files
    from tokamake.retrieval import faiss_index
    from tokamake.retrieval.embeddings import open_embeddings
    from tokamake.retrieval.products import (
        check_name,
        check_not_negative,
        check_outside,
        is_complete,
        new_product,
    )
    from tokamake.retrieval.searched import INDEX_KIND, INDEX_SUFFIX

    check_name(output)
    check_outside(output, embeddings)
    check_not_negative({"--train-vectors": train_vectors, "--seed": seed, "--workers": workers})
    store = open_embeddings(embeddings, shards=shards)
    size = faiss_index.sample_size(factory, train_vectors, num_vectors=store.num_vectors)
    index = faiss_index.empty_index(factory, dimension=store.dimension, seed=seed)
    facts: dict[str, Any] = {
        "factory": factory,
        "metric": "inner_product",
        "seed": seed,
        "train_vectors": 0 if index.is_trained else size,
        "num_vectors": store.num_vectors,
        "dimension": store.dimension,
        "embeddings": store.facts,
    }
    facts["request"] = files.digest(facts)
    if is_complete(output, INDEX_KIND, request=facts["request"]):
        print(f"{output}: already complete")
        return
    faiss_index.fill(index, store, facts=facts, workers=workers)
    with new_product(output, kind=INDEX_KIND, suffixes=(INDEX_SUFFIX,), facts=facts) as product:
        faiss_index.write_index(index, product.paths[INDEX_SUFFIX], name=output)
    print(f"{output}: {factory}, {store.num_vectors:,} vectors of dimension {store.dimension}")
