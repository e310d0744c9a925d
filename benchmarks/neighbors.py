"""Time the neighbors of objective retro: index and search against FAISS alone, and the loader.

    python benchmarks/neighbors.py --chunks 1000000 --dimension 64 --work /scratch

Datasets are drawn tokens, vectors are drawn, too; no model embeds anything. FAISS alone gets all
vectors in memory as fp32, and filters nothing. The stages read fp16 shards from disk, drop chunks
of the samples' own documents, and write results with hashes. Both train on the same number of
vectors with one thread, and take turns, round by round. Figures are medians.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np

from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.index import index
from tokamake.retrieval.chunk_tables import table_facts, write_table
from tokamake.retrieval.embeddings import new_shard, open_embeddings
from tokamake.retrieval.faiss_index import usable_cores
from tokamake.retrieval.find_neighbors import find_neighbors
from tokamake.retrieval.index_chunks import index_chunks
from tokamake.train.objectives.retro.chunks import first_chunks
from tokamake.train.objectives.retro.samples import ChunkedSamples, RetroSamples

_LENGTH, _CHUNK = 2048, 64
_EOD, _VOCAB = 0, 50_000
_CLUSTERS = 2000
_NPROBE, _FOUND, _KEPT = 16, 200, 20
_NAME = "drawn"
_MODEL = {"model": "drawn", "tokenizer": "", "sequence_length": _CHUNK, "decoded_by": ""}

Times = tuple[float, float]


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--factory", default="IVF1024,Flat")
    parser.add_argument("--train-vectors", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    folder: Path = options.work / "neighbors-benchmark"
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, options)
    write_vectors(folder, options)
    times: dict[str, list[Times]] = {}
    for number in range(options.rounds):
        turns = [with_faiss, with_stages] if number % 2 else [with_stages, with_faiss]
        for turn in turns:
            for name, measured in turn(folder, options).items():
                times.setdefault(name, []).append(measured)
    print("| | FAISS alone, s (CPU s) | tokamake, s (CPU s) | FAISS / tokamake, CPU s |")
    print("| --- | ---: | ---: | ---: |")
    for part in ("train and add", "search"):
        (wall, cpu), (our_wall, our_cpu) = (
            [median(values) for values in zip(*times[f"{part} {name}"], strict=True)]
            for name in ("faiss", "tokamake")
        )
        print(
            f"| {part} | {wall:.1f} ({cpu:.1f}) | {our_wall:.1f} ({our_cpu:.1f}) "
            f"| {cpu / our_cpu:.2f} |"
        )
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
    draw = np.random.default_rng(1)
    centers = draw.standard_normal((_CLUSTERS, options.dimension), dtype=np.float32)
    given: dict[str, dict[str, Any]] = {
        f"vectors/{_NAME}": {"chunks": facts["request"]},
        "asked": {"samples": samples.samples_digest(0)},
    }
    numbers = (int(table[-1]), samples.num_drawn(0) * samples.num_chunks)
    for (name, made_from), number in zip(given.items(), numbers, strict=True):
        noise = draw.standard_normal((number, options.dimension), dtype=np.float32)
        vectors = centers[draw.integers(_CLUSTERS, size=number)] + 0.5 * noise
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
            nprobe=_NPROBE,
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
    size = min(options.train_vectors, len(vectors))
    sample = vectors[np.sort(np.random.default_rng(1).choice(len(vectors), size, replace=False))]
    built = faiss.index_factory(options.dimension, options.factory, faiss.METRIC_INNER_PRODUCT)

    def build() -> None:
        faiss.omp_set_num_threads(1)
        built.train(sample)
        faiss.omp_set_num_threads(usable_cores())
        built.add(vectors)

    times = {"train and add faiss": seconds(build)}
    faiss.extract_index_ivf(built).nprobe = _NPROBE
    return {**times, "search faiss": seconds(lambda: built.search(queries, _FOUND))}


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


def seconds(run: Callable[[], object]) -> Times:
    """Wall-clock time and CPU time of all threads."""
    start, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu


if __name__ == "__main__":
    main()
