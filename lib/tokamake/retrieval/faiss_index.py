"""FAISS: empty indexes from strings, training with the same result each time, files."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokamake.errors import UserError
from tokamake.retrieval.embeddings import Ids, Vectors
from tokamake.runtime.console import counted

EXAMPLES = "Flat, IVF1024,Flat, HNSW32, IVF1024,PQ16 or OPQ16_64,IVF1024_HNSW32,PQ16"
WANTED_PER_CENTROID = 39
"""Vectors for each centroid below which FAISS warns (faiss/Clustering.h)."""
MOST_PER_CENTROID = 256
"""Vectors for each centroid above which FAISS takes a sample of them (faiss/Clustering.h)."""
TRAINED_WITHOUT_CENTROIDS = 2**16
"""Vectors from which PCA or a scalar quantizer learn."""
_MOST_ON_GPU = 2048
"""Largest k and nprobe of FAISS on a GPU (faiss/gpu: getMaxKSelection)."""
_BLOCK_VALUES = 2**24
"""Values of the fp32 vectors that are added at once: 64 MiB."""


def load_faiss() -> ModuleType:
    """Import faiss, of faiss-cpu or faiss-gpu."""
    try:
        import faiss
    except ModuleNotFoundError:
        raise UserError("faiss is not installed; pip install 'tokamake[retrieval]'") from None
    module: ModuleType = faiss
    return module


def num_centroids(factory: str) -> int:
    """Centroids of the largest k-means that an index string needs; 0 without training."""
    lists = [int(number) for number in re.findall(r"\bIVF(\d+)", factory)]
    # PQ16 has codes of 8 bits, PQ16x4 of 4 bits.
    # The rotation of OPQ is learned with codes of 8 bits, whatever the index has.
    codes = [2 ** int(bits or 8) for bits in re.findall(r"\bO?PQ\d+(?:x(\d+))?", factory)]
    return max([*lists, *codes], default=0)


def empty_index(factory: str, *, dimension: int, seed: int) -> Any:
    """Make an index for inner products, with ids, from a string of FAISS's index_factory.

    Args:
        factory: the string.
        dimension: length of a vector.
        seed: of k-means for lists and for the codes of a product quantizer. FAISS does not expose
            the seed of OPQ's rotation.
    """
    faiss = load_faiss()
    try:
        if re.search(r"\bIDMap|\b(IVF|HNSW|PQ)0", factory):
            raise RuntimeError("Error: IDMap and zeros are not allowed")
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except (MemoryError, RuntimeError) as error:
        raise UserError(
            f"--factory: {factory!r}: not an index of FAISS for vectors of dimension {dimension} "
            f"({_reason(error)}); give one such as {EXAMPLES}"
        ) from None
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None:
        lists.cp.seed = seed
    coder = index
    if isinstance(index, faiss.IndexPreTransform):
        coder = faiss.downcast_index(index.index)
    if hasattr(coder, "pq"):
        coder.pq.cp.seed = seed
    return faiss.IndexIDMap(index)


def train(index: Any, sample: Vectors) -> None:
    """Train an index with one thread: with more, OPQ's rotation depends on their number."""
    with num_threads(1), _without_warnings():
        index.train(sample)


def adding_threads(factory: str, workers: int) -> int:
    """Threads that add vectors; one for graphs, whose edges depend on the order of insertions."""
    return 1 if re.search(r"(^|,)(HNSW|NSG)", factory) else workers or usable_cores()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


class Stored(Protocol):
    """Vectors to index, in an order."""

    @property
    def ids(self) -> Ids: ...

    @property
    def num_vectors(self) -> int: ...

    @property
    def dimension(self) -> int: ...

    def take(self, positions: npt.NDArray[np.int64], /) -> Vectors:
        """Vectors at sorted positions."""

    def blocks(self, rows: int, /) -> Iterator[Vectors]:
        """All vectors in order, `rows` at a time."""


def sample_size(factory: str, train_vectors: int, *, num_vectors: int) -> int:
    """Number of vectors to train on; a UserError if they are fewer than the centroids."""
    centroids = num_centroids(factory)
    default = MOST_PER_CENTROID * centroids or TRAINED_WITHOUT_CENTROIDS
    size = min(train_vectors or default, num_vectors)
    if size < centroids:
        remedy = "raise --train-vectors" if centroids <= num_vectors else "choose fewer"
        raise UserError(
            f"--factory: {factory} has {centroids:,} centroids, which need as many vectors; "
            f"{size:,} of {num_vectors:,} are there to train on; {remedy}"
        )
    if size < WANTED_PER_CENTROID * centroids:
        wanted = WANTED_PER_CENTROID * centroids
        print(f"{factory}: trains on {size:,} vectors; FAISS recommends {wanted:,} or more")
    return size


def fill(index: Any, store: Stored, *, facts: dict[str, Any], workers: int) -> None:
    """Train an empty index on a sample of the vectors, then add all of them, block by block.

    Args:
        facts: of the manifest: factory, seed, train_vectors.
        workers: threads that add vectors; 0: all cores.
    """
    size, total = facts["train_vectors"], store.num_vectors
    with _refusing(facts["factory"], num_vectors=total):
        if not index.is_trained:
            draw = np.random.default_rng(facts["seed"])
            train(
                index, store.take(np.sort(draw.choice(total, size, replace=False, shuffle=False)))
            )
        with num_threads(adding_threads(facts["factory"], workers)):
            start = 0
            for vectors in store.blocks(max(1, _BLOCK_VALUES // store.dimension)):
                index.add_with_ids(vectors, store.ids[start : start + len(vectors)])
                start += len(vectors)


@contextmanager
def _refusing(factory: str, *, num_vectors: int) -> Iterator[None]:
    """Turn what FAISS says of too few vectors into one line; each index has bounds of its own."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(
            f"--factory: FAISS cannot build {factory} for {num_vectors:,} vectors "
            f"({_reason(error)}); choose another index, such as {EXAMPLES}"
        ) from None


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Let FAISS use so many threads."""
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(number)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def write_index(index: Any, path: Path, *, name: Path) -> None:
    """Write an index; `name` is the final file, for messages."""
    try:
        load_faiss().write_index(index, str(path))
    except RuntimeError as error:  # of the disk; FAISS has no other class
        raise OSError(errno.EIO, _reason(error), str(name)) from None


def read_index(path: Path, *, remedy: str) -> Any:
    try:
        return load_faiss().read_index(str(path))
    except RuntimeError as error:
        raise UserError(f"{path}: not an index of FAISS ({_reason(error)}); {remedy}") from None


def set_parameter(index: Any, parameter: str, *, value: int, factory: str, option: str) -> None:
    """Set `nprobe` or `efSearch` of an index; a UserError if it has no such parameter."""
    try:
        load_faiss().ParameterSpace().set_index_parameter(index, parameter, value)
    except RuntimeError:
        raise UserError(
            f"{option}: an index {factory} has no {parameter}; leave the option out"
        ) from None


def on_gpus(index: Any, *, most: int) -> Any:
    """Copy an index to all GPUs, if faiss-gpu is installed and finds any; else return it.

    FAISS has no graphs for GPUs; these stay on the CPU, as does an index that needs more memory.

    Args:
        index: with its parameters, which the copy has, too.
        most: the larger one of k and nprobe.
    """
    faiss = load_faiss()
    number = faiss.get_num_gpus()
    if not number or most > _MOST_ON_GPU:
        return index
    try:
        copied = faiss.index_cpu_to_all_gpus(index)
    except RuntimeError as error:
        print(f"searches without a GPU: FAISS cannot copy the index there ({_reason(error)})")
        return index
    print(f"searches on {counted(number, 'GPU')}")
    return copied


def _reason(error: Exception) -> str:
    """FAISS's message without functions, files and lines of its source."""
    text = " ".join(str(error).split())
    text = re.sub(r"/\S+\.tmp-\S+", "file", text.rpartition(" failed: ")[2])
    return re.sub(r"^Error in .* at \S+: ", "", text).removeprefix("Error: ")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide standard error: FAISS repeats a warning for each part of a product quantizer."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
