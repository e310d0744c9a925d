"""FAISS alone beside two stages of tokamake, which build an index and search it."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np

from tokamake.retrieval.faiss_index import usable_cores

_NUM_CLUSTERS = 2000
NPROBE = 16

Times = tuple[float, float]
"""Wall-clock seconds and CPU seconds."""
Turn = Callable[[Path, argparse.Namespace], dict[str, Times]]
"""Times by part and by who does it: `search faiss`."""


def read_options(description: str | None, counted: str) -> argparse.Namespace:
    """Read the options of the command line.

    Args:
        counted: name of the option that counts indexed vectors.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(f"--{counted}", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--factory", default="IVF1024,Flat")
    parser.add_argument("--train-vectors", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    return parser.parse_args()


class Clusters:
    """Draws vectors near random centers, as vectors of texts are."""

    def __init__(self, seed: int, dimension: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._centers = self._draw.standard_normal((_NUM_CLUSTERS, dimension), dtype=np.float32)

    def draw(self, number: int) -> Any:
        """(number, dimension) vectors."""
        shape = (number, self._centers.shape[1])
        noise = self._draw.standard_normal(shape, dtype=np.float32)
        return self._centers[self._draw.integers(_NUM_CLUSTERS, size=number)] + 0.5 * noise


def take_turns(
    folder: Path, options: argparse.Namespace, *, with_stages: Turn, with_faiss: Turn
) -> None:
    """Measure both, round by round, and print a table of medians."""
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


def search_alone(
    vectors: Any, queries: Any, options: argparse.Namespace, *, top_k: int
) -> tuple[dict[str, Times], Any]:
    """Let FAISS index vectors and search, all in memory: times, and positions (queries, k)."""
    size = min(options.train_vectors, len(vectors))
    draw = np.random.default_rng(1)
    sample = vectors[np.sort(draw.choice(len(vectors), size, replace=False, shuffle=False))]
    index = faiss.index_factory(options.dimension, options.factory, faiss.METRIC_INNER_PRODUCT)
    faiss.extract_index_ivf(index).cp.seed = 1  # as the stages

    def build() -> None:
        faiss.omp_set_num_threads(1)
        index.train(sample)
        faiss.omp_set_num_threads(usable_cores())
        index.add(vectors)

    times = {"train and add faiss": seconds(build)}
    faiss.extract_index_ivf(index).nprobe = NPROBE
    found: list[Any] = []
    times["search faiss"] = seconds(lambda: found.extend(index.search(queries, top_k)))
    return times, found[1]


def seconds(run: Callable[[], object]) -> Times:
    """Wall-clock time and CPU time of all threads."""
    start, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu
