"""Stage `index-chunks`: an index of FAISS for the chunks of a training split."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.retrieval.chunk_vectors import ChunkVectors, TrainedDataset


def index_chunks(
    index: Path,
    /,
    *,
    chunks: Path,
    embeddings: Path,
    output: Path | None = None,
    factory: str = "Flat",
    train_vectors: int = 0,
    num_found: int = 1,
    seed: int = 1,
    workers: int = 0,
) -> None:
    """Number the chunks of all datasets of a training split, and index their vectors.

    The index has chunks of documents of the training split alone: no document of a validation or
    test split becomes a neighbor. It is trained on a random sample of all of them.

    Args:
        index: folder of `index`, with samples of objective retro.
        chunks: folder with a manifest of `chunk-documents` for each dataset, NAME.json.
        embeddings: folder with a folder of embeddings for each dataset, NAME.
        output: manifest to write, NAME.json; the index is NAME.faiss, and NAME.npy has the number
            of the first chunk of each document. By default neighbors/chunks.json beside the index
            folder, where the trainer looks for it.
        factory: string of FAISS's index_factory, such as Flat, IVF1024,Flat or
            OPQ32_64,IVF65536_HNSW8,PQ32.
        train_vectors: number of random vectors to train on; 0: 256 for each centroid, at most all.
        num_found: chunks that each search will find; fewer vectors are refused.
        seed: of the sample, and of k-means.
        workers: threads that add vectors; 0: all cores.
    """
    import numpy as np

    from tokamake.retrieval import faiss_index
    from tokamake.retrieval.chunk_vectors import ChunkVectors, all_first_chunks, trained_datasets
    from tokamake.retrieval.products import (
        check_name,
        check_not_negative,
        is_complete,
        new_product,
    )
    from tokamake.retrieval.searched import INDEX_KIND, INDEX_SUFFIX
    from tokamake.train.objectives.retro.chunks import FIRST_CHUNKS, INDEX_NAME
    from tokamake.train.objectives.retro.samples import neighbor_folder

    output = output or neighbor_folder(index) / INDEX_NAME
    check_name(output)
    check_not_negative({"--train-vectors": train_vectors, "--seed": seed, "--workers": workers})
    datasets = trained_datasets(index, chunks)
    store = ChunkVectors(datasets, embeddings)
    check_num_found(num_found, store.num_vectors, where=f"the training split of {index}")
    size = faiss_index.sample_size(factory, train_vectors, num_vectors=store.num_vectors)
    empty = faiss_index.empty_index(factory, dimension=store.dimension, seed=seed)
    trained_on = {"seed": seed, "train_vectors": 0 if empty.is_trained else size}
    facts = _facts(datasets, store, factory=factory, **trained_on)
    if is_complete(output, INDEX_KIND, request=facts["request"]):
        print(f"{output}: already complete")
        return
    table = all_first_chunks(datasets)
    facts["num_documents"] = len(table) - 1
    faiss_index.fill(empty, store, facts=facts, workers=workers)
    suffixes = (FIRST_CHUNKS, INDEX_SUFFIX)
    with new_product(output, kind=INDEX_KIND, suffixes=suffixes, facts=facts) as product:
        with product.paths[FIRST_CHUNKS].open("wb") as file:
            np.save(file, table)
        faiss_index.write_index(empty, product.paths[INDEX_SUFFIX], name=output)
    print(f"{output}: {factory}, {store.num_vectors:,} chunks of {len(datasets):,} datasets")


def _facts(
    datasets: "list[TrainedDataset]",
    store: "ChunkVectors",
    *,
    factory: str,
    seed: int,
    train_vectors: int,
) -> dict[str, Any]:
    """Facts that decide an index, and their digest, `request`."""
    from tokamake import files
    from tokamake.train.objectives.retro.chunks import ChunkedDataset

    listed = [
        ChunkedDataset(each.prefix, each.identity, each.first_document, each.first_chunk)
        for each in datasets
    ]
    facts = {
        "factory": factory,
        "metric": "inner_product",
        "seed": seed,
        "train_vectors": train_vectors,
        "num_vectors": store.num_vectors,
        "dimension": store.dimension,
        "embeddings": store.facts,
        "chunk_length": datasets[0].table.chunk_length,
        "eod": datasets[0].table.eod,
        "datasets": [each._asdict() for each in listed],
    }
    return {**facts, "request": files.digest(facts)}


def check_num_found(num_found: int, num_chunks: int, *, where: str) -> None:
    """Refuse searches that would find more chunks than there are."""
    if num_found > num_chunks:
        raise UserError(
            f"--num-found: {num_found}: more than the {num_chunks:,} chunks of {where}; lower it "
            "(train.retro.num_found), or add documents"
        )
