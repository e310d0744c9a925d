"""Stage `search`: the vectors that are most similar to each query."""

from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.retrieval.queries import Queries
    from tokamake.retrieval.searched import Searched


def search(
    *,
    queries: Path,
    output: Path,
    index: Path | None = None,
    embeddings: Path | None = None,
    shards: tuple[str, ...] = (),
    top_k: int = 100,
    nprobe: int = 0,
    ef_search: int = 0,
    workers: int = 0,
) -> None:
    """Find the vectors with the largest inner products with each query.

    With an index, FAISS searches it. Without one, all embeddings are compared, which is exact.

    Args:
        queries: folder of embeddings, or .npy file of vectors (n, d).
        output: manifest to write, NAME.json; NAME.ids.npy, NAME.scores.npy and NAME.queries.npy
            are beside it.
        index: manifest of `index-blocks`.
        embeddings: folder of embeddings: searched if there is no index, else compared with the
            folder that was indexed.
        shards: names of the shards of that folder to search; by default, all.
        top_k: number of vectors to find for each query.
        nprobe: lists of an IVF index to search; 0: 1, as in FAISS. More find more, but take longer.
        ef_search: candidates in an HNSW graph; 0: 16, as in FAISS.
        workers: threads of FAISS; 0: all cores. A search without an index uses OMP_NUM_THREADS.
    """
    from tokamake import files
    from tokamake.retrieval.found import KIND, Found, write_found
    from tokamake.retrieval.products import (
        check_name,
        check_not_negative,
        check_outside,
        is_complete,
    )
    from tokamake.retrieval.queries import open_queries
    from tokamake.retrieval.searched import open_searched

    check_name(output)
    check_outside(output, queries, embeddings)
    if index and output.resolve() == index.resolve():
        raise UserError(f"--output: {output} is the index; name another file")
    check_not_negative({"--nprobe": nprobe, "--ef-search": ef_search, "--workers": workers})
    given = {"nprobe": nprobe, "efSearch": ef_search}
    parameters = {name: value for name, value in given.items() if value}
    searched = open_searched(
        index, embeddings, shards=shards, parameters=parameters, workers=workers
    )
    asked = open_queries(queries)
    _check(asked, searched, queries=queries, top_k=top_k)
    facts = {"top_k": top_k, "queries": asked.facts, "searched": searched.facts}
    facts["request"] = files.digest(facts)
    if is_complete(output, KIND, request=str(facts["request"])):
        print(f"{output}: already complete")
        return
    ids, scores = searched.find(asked.vectors, k=top_k)
    write_found(output, Found(asked.ids, ids, scores), facts=facts)
    short = int((ids[:, -1] < 0).sum())
    more = f"; {short:,} found fewer: raise --nprobe or --ef-search" if short else ""
    print(f"{output}: {top_k} for each of {len(ids):,} queries{more}")


def _check(asked: "Queries", searched: "Searched", *, queries: Path, top_k: int) -> None:
    """Refuse queries that do not fit the vectors, and more results than vectors."""
    dimension = asked.vectors.shape[1]
    if dimension != searched.dimension:
        raise UserError(
            f"--queries: {queries} has vectors of dimension {dimension}, but {searched.path} of "
            f"{searched.dimension}; embed both with one model"
        )
    models = [asked.facts["made_from"], searched.facts["embeddings"]["made_from"]]
    query_model, model = (str(facts.get("model", "")) for facts in models)
    if query_model and model and query_model != model:
        raise UserError(
            f"--queries: {queries} was embedded by the model {query_model[:12]}, but "
            f"{searched.path} by {model[:12]}; embed both with one model"
        )
    if not 0 < top_k <= searched.num_vectors:
        raise UserError(
            f"--top-k: {top_k} for the {searched.num_vectors:,} vectors of {searched.path}; give "
            "1 or more, at most as many as there are vectors"
        )
