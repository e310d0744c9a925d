"""Time the neighbors of objective retro: index and search against FAISS alone, and the loader.

    python benchmarks/neighbors.py --chunks 1000000 --dimension 64 --work /scratch

Datasets are drawn tokens, vectors are drawn, too; no model embeds anything. FAISS alone gets all
vectors in memory as fp32, and filters nothing. The stages read fp16 shards from disk, drop chunks
of the samples' own documents, and write results with hashes. Both train on the same number of
vectors with one thread, and take turns, round by round. Figures are medians.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from faiss_alone import NPROBE, Clusters, Times, read_options, search_alone, seconds, take_turns

from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.index import index
from tokamake.retrieval.chunk_tables import table_facts, write_table
from tokamake.retrieval.embeddings import new_shard, open_embeddings
from tokamake.retrieval.find_neighbors import find_neighbors
from tokamake.retrieval.index_chunks import index_chunks
from tokamake.train.objectives.retro.chunks import first_chunks
from tokamake.train.objectives.retro.samples import ChunkedSamples, RetroSamples

_LENGTH, _CHUNK = 2048, 64
_EOD, _VOCAB = 0, 50_000
_FOUND, _KEPT = 200, 20
_NAME = "drawn"
_MODEL = {"model": "drawn", "tokenizer": "", "sequence_length": _CHUNK, "decoded_by": ""}


def main() -> None:
    """Measure and print tables."""
    options = read_options(__doc__, "chunks")
    folder: Path = options.work / "neighbors-benchmark"
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, options)
    write_vectors(folder, options)
    take_turns(folder, options, with_stages=with_stages, with_faiss=with_faiss)
    print_loader(folder, options)


def write_data(folder: Path, options: argparse.Namespace) -> None:
    """Write documents of 1 to 40 chunks, and index samples of them."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 40 * _CHUNK, size=options.chunks // 20 + 1).astype(np.int32)
    tokens = draw.integers(1, _VOCAB, size=int(lengths.sum()), dtype=np.int64)
    tokens[np.cumsum(lengths) - 1] = _EOD
    files = [folder / f"{_NAME}.{kind}" for kind in ("bin", "idx")]
    with DatasetWriter(files[0], files[1], dtype=np.uint16) as writer:
        writer.add(tokens, lengths)
    (folder / "weights.txt").write_text(f"1 {_NAME} {_NAME}\n")
    index(
        weights=folder / "weights.txt",
        sequence_length=_LENGTH,
        train_samples=max(1, options.queries // (_LENGTH // _CHUNK)),
        valid_samples=0,
        split="100,0,0",
        objective="retro",
        objective_settings=json.dumps({"chunk_length": _CHUNK}),
        seed=1,
        output=folder / "index",
    )


def write_vectors(folder: Path, options: argparse.Namespace) -> None:
    """Write vectors of clusters for all chunks, and vectors near them for the samples' chunks."""
    facts = table_facts(folder / _NAME, chunk_length=_CHUNK, eod=_EOD)
    samples = opened(ChunkedSamples, folder)
    table = first_chunks(samples._dataset(0), chunk_length=_CHUNK, eod=_EOD)
    write_table(folder / f"chunks/{_NAME}.json", table, facts=facts)
    clusters = Clusters(1, options.dimension)
    given: dict[str, dict[str, Any]] = {
        f"vectors/{_NAME}": {"chunks": facts["request"]},
        "asked": {"samples": samples.samples_digest(0)},
    }
    numbers = (int(table[-1]), samples.num_drawn(0) * samples.num_chunks)
    for (name, made_from), number in zip(given.items(), numbers, strict=True):
        vectors = clusters.draw(number)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        manifest = folder / name / "0.json"
        with new_shard(
            manifest, dimension=options.dimension, made_from={**_MODEL, **made_from}
        ) as shard:
            shard.append(np.arange(number), vectors)


def opened(kind: Any, folder: Path) -> Any:
    return kind(folder / "index", split="train", data_root=folder)


def with_stages(folder: Path, options: argparse.Namespace) -> dict[str, Times]:
    """Seconds of the two stages."""
    for path in (folder / "neighbors").rglob("*.json"):
        path.unlink()

    def build() -> None:
        index_chunks(
            folder / "index",
            chunks=folder / "chunks",
            embeddings=folder / "vectors",
            factory=options.factory,
            train_vectors=options.train_vectors,
        )

    def find() -> None:
        find_neighbors(
            folder / "index",
            data_root=folder,
            split="train",
            dataset=_NAME,
            queries=folder / "asked",
            num_found=_FOUND,
            num_kept=_KEPT,
            nprobe=NPROBE,
        )

    return {"train and add tokamake": seconds(build), "search tokamake": seconds(find)}


def with_faiss(folder: Path, options: argparse.Namespace) -> dict[str, Times]:
    """Seconds of FAISS, with vectors and index in memory."""
    vectors, queries = (
        store.take(np.arange(store.num_vectors))
        for store in (
            open_embeddings(folder / f"vectors/{_NAME}"),
            open_embeddings(folder / "asked"),
        )
    )
    return search_alone(vectors, queries, options, top_k=_FOUND)[0]


def print_loader(folder: Path, options: argparse.Namespace) -> None:
    """Print the time of a sample with and without neighbors."""
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, kind in (("tokens", DocumentSamples), ("with neighbors", RetroSamples)):
            samples = opened(kind, folder)
            number = min(len(samples), 500)
            samples[0]
            wall, _ = seconds(lambda s=samples, n=number: [s[row] for row in range(n)])
            times.setdefault(name, []).append(wall / number)
    for name, values in times.items():
        second = median(values)
        print(f"{name}: {1e6 * second:,.0f} us a sample, {_LENGTH / second:,.0f} tokens/s")


if __name__ == "__main__":
    main()
