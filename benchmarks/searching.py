"""Time index-blocks and search against FAISS alone, on drawn vectors.

    python benchmarks/searching.py --vectors 1000000 --dimension 64 --work /scratch

FAISS alone gets all vectors in memory as fp32. The stages read fp16 shards from disk, and write
indexes and results with hashes. Both train on the same sample with one thread, and take turns,
round by round. Figures are medians.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np

from tokamake.retrieval.embeddings import new_shard, open_embeddings
from tokamake.retrieval.found import read_found
from tokamake.retrieval.index_blocks import index_blocks
from tokamake.retrieval.search import search

_SHARD = 250_000
_CLUSTERS = 2000
_NPROBE, _TOP_K = 16, 20

Times = tuple[float, float]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--factory", default="IVF1024,Flat")
    parser.add_argument("--train-vectors", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    folder = write_vectors(options)
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


def write_vectors(options: argparse.Namespace) -> Path:
    """Write vectors of clusters as shards, and queries near some of them."""
    draw = np.random.default_rng(0)
    centers = draw.standard_normal((_CLUSTERS, options.dimension), dtype=np.float32)

    def near(number: int) -> Any:
        noise = draw.standard_normal((number, options.dimension), dtype=np.float32)
        return centers[draw.integers(_CLUSTERS, size=number)] + 0.5 * noise

    folder: Path = options.work / "vectors"
    for start in range(0, options.vectors, _SHARD):
        number = min(_SHARD, options.vectors - start)
        manifest = folder / f"{start:09}.json"
        with new_shard(manifest, dimension=options.dimension, made_from={}) as shard:
            shard.append(np.arange(start, start + number), near(number))
    np.save(options.work / "queries.npy", near(options.queries))
    return folder


def with_stages(folder: Path, options: argparse.Namespace) -> dict[str, Times]:
    """Seconds of the two stages."""
    index, found = options.work / "index.json", options.work / "found.json"
    for path in (index, found):
        path.unlink(missing_ok=True)
    sample = {"factory": options.factory, "train_vectors": options.train_vectors}
    queries = options.work / "queries.npy"
    limits = {"top_k": _TOP_K, "nprobe": _NPROBE}
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
    size = min(options.train_vectors, len(vectors))
    draw = np.random.default_rng(1)
    sample = vectors[np.sort(draw.choice(len(vectors), size, replace=False, shuffle=False))]
    queries = np.load(options.work / "queries.npy")
    index = faiss.index_factory(options.dimension, options.factory, faiss.METRIC_INNER_PRODUCT)
    faiss.extract_index_ivf(index).cp.seed = 1  # as index-blocks

    def build() -> None:
        cores = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)
        index.train(sample)
        faiss.omp_set_num_threads(cores)
        index.add(vectors)

    built = seconds(build)
    index.nprobe = _NPROBE
    ids = np.empty(0)

    def find() -> None:
        nonlocal ids
        _, ids = index.search(queries, _TOP_K)

    searched = seconds(find)
    check_alike(ids, options.work / "found.json")
    return {"train and add faiss": built, "search faiss": searched}


def check_alike(ids: Any, manifest: Path) -> None:
    """Compare the passages found with the stages' result, if there is one."""
    if manifest.exists():
        same = float((read_found(manifest)[0].ids == ids).mean())
        assert same > 0.999, f"{same:.1%} of the ids are the same"


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock time and CPU time of all threads."""
    start, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu


if __name__ == "__main__":
    main()
