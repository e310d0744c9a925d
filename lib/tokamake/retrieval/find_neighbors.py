"""Stage `find-neighbors`: the chunks that are most similar to each chunk of the samples."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError
from tokamake.retrieval.index_chunks import check_num_found

if TYPE_CHECKING:
    from tokamake.retrieval.searched import SearchedIndex

KIND = "neighbors"


def find_neighbors(
    index: Path,
    /,
    *,
    data_root: Path,
    split: str,
    dataset: str,
    queries: Path,
    chunks: Path | None = None,
    output: Path | None = None,
    num_found: int = 200,
    num_kept: int = 20,
    nprobe: int = 0,
    ef_search: int = 0,
    workers: int = 0,
) -> None:
    """Find the neighbors of all chunks of a split's samples from a dataset.

    A search finds `num_found` chunks. Chunks of documents that the sample has tokens of are
    dropped, then the `num_kept` most similar ones are kept.

    Args:
        index: folder of `index`, with samples of objective retro.
        data_root: folder that the prefixes in the index are relative to.
        split: train, valid or another split of the index.
        dataset: name of the dataset, its prefix without folders.
        queries: folder of embeddings of `embed-samples`.
        chunks: manifest of `index-chunks`; by default neighbors/chunks.json beside the index.
        output: manifest to write, NAME.json; NAME.npy beside it has the numbers of the neighbors,
            (samples, chunks, num_kept) int64, -1 where there are fewer. By default
            SPLIT/DATASET.json beside the manifest of `index-chunks`, where the trainer looks for
            it.
        num_found: chunks that a search finds.
        num_kept: most neighbors of a chunk.
        nprobe: lists of an IVF index to search; 0: 1, as in FAISS.
        ef_search: candidates in an HNSW graph; 0: 16, as in FAISS.
        workers: threads of FAISS; 0: all cores.
    """
    from tokamake import files
    from tokamake.retrieval.neighbors import ChunkQueries, write_neighbors
    from tokamake.retrieval.products import check_name, check_not_negative, is_complete
    from tokamake.retrieval.searched import SearchedIndex
    from tokamake.train.objectives.retro.chunks import INDEX_NAME, ChunkDatabase
    from tokamake.train.objectives.retro.samples import ChunkedSamples, neighbor_folder

    chunks = chunks or neighbor_folder(index) / INDEX_NAME
    output = output or chunks.parent / split / f"{dataset}.json"
    check_name(output)
    check_not_negative({"--nprobe": nprobe, "--ef-search": ef_search, "--workers": workers})
    given = {"nprobe": nprobe, "efSearch": ef_search}
    parameters = {name: value for name, value in given.items() if value}
    searched = SearchedIndex(chunks, parameters=parameters, workers=workers, uses_gpus=True)
    _check_numbers(searched, num_found=num_found, num_kept=num_kept)
    database = ChunkDatabase(chunks, data_root=data_root)
    samples = ChunkedSamples(index, split=split, data_root=data_root)
    number = samples.number(dataset)
    asked = ChunkQueries(queries, samples, number=number, searched=searched)
    facts: dict[str, Any] = {
        "samples": asked.samples_digest,
        "chunks": database.request,
        "num_found": num_found,
        "num_kept": num_kept,
        "queries": asked.facts,
        **parameters,
    }
    facts["request"] = files.digest(facts)
    if is_complete(output, KIND, request=str(facts["request"])):
        print(f"{output}: already complete")
        return
    counts = write_neighbors(
        output, asked, database=database, searched=searched, facts=facts, kind=KIND
    )
    num_chunks = asked.num_samples * samples.num_chunks
    missing = f"; {counts:,} without any" if counts else ""
    print(f"{output}: neighbors of {num_chunks:,} chunks{missing}")


def _check_numbers(searched: "SearchedIndex", *, num_found: int, num_kept: int) -> None:
    """Refuse more neighbors than there are chunks."""
    if not 0 < num_kept <= num_found:
        raise UserError(f"--num-kept: {num_kept}: keep 1 or more, at most --num-found {num_found}")
    check_num_found(num_found, searched.num_vectors, where=str(searched.path))
