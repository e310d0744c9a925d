"""Compare blends, sentence mappings and sample indexes with megatron-core's, in one process.

    python benchmarks/blending.py --rounds 5 --documents 20000000

Both take turns, round by round, and must give equal results. Printed times are medians. With
--beside pool, the blend without vectors (pool_alone.cpp) takes the place of megatron-core.
"""

import argparse
import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from tokamake import _csrc
from tokamake.data.indexed import dataset
from tokamake.data.samples import sample_index

_HERE = Path(__file__).parent
_ALL = 2**63 - 1
_LENGTH = 2048
_SEED = 1234

Arrays = tuple[np.ndarray, ...]
Contest = tuple[str, int, Callable[[], Arrays], Callable[[], Arrays]]
"""Name, number of entries, and the functions of megatron-core and tokamake."""
Blend = Callable[[np.ndarray, int], Arrays]
"""Function of the weights and the number of samples."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=20_000_000, help="of the dataset")
    parser.add_argument("--beside", choices=["megatron-core", "pool"], default="megatron-core")
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    print(f"| | {options.beside}, ns each | tokamake, ns each | times |\n| --- | --- | --- | --- |")
    if options.beside == "pool":
        contests = blends(pool_alone(options.work))
    else:
        index = whole_index(options.documents, options.work)
        contests = [*blends(megatron_blend), exhaustive_blend(), *sentence_data(), index]
    for contest in contests:
        print(row(contest, options.rounds), flush=True)


def row(contest: Contest, rounds: int) -> str:
    """Run both in turns and format the medians as a row of the table."""
    name, size, *both = contest
    seconds: list[list[float]] = [[], []]
    for number in range(rounds):
        results: list[Any] = [None, None]
        for place in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            results[place] = both[place]()
            seconds[place].append(time.perf_counter() - start)
        for theirs, ours in zip(*results, strict=True):
            np.testing.assert_array_equal(ours, theirs, strict=True)
    theirs, ours = (median(times) for times in seconds)
    nanoseconds = [f"{1e9 * each / size:,.1f}" for each in (theirs, ours)]
    return f"| {name} | {nanoseconds[0]} | {nanoseconds[1]} | {theirs / ours:.1f} |"


def blends(theirs: Blend) -> list[Contest]:
    """Blends of several sizes with several kinds of weights."""
    random = np.random.default_rng(0)
    contests: list[Contest] = []
    sizes = {2: 3_000_000, 7: 3_000_000, 30: 3_000_000, 100: 3_000_000, 2419: 1_000_000}
    for sets, size in {**sizes, 20_000: 200_000}.items():
        kinds = {
            "uniform": random.random(sets) + 1e-3,
            "log-normal": np.exp(2 * random.standard_normal(sets)),
            "within 1%": 1 + 0.01 * random.random(sets),
            "equal": np.ones(sets),
        }
        for kind, weights in kinds.items():
            name = f"blend, {sets:,} sets, {kind} weights, {size:,} samples"
            weights /= weights.sum()
            ours = partial(our_blend, weights, size)
            contests.append((name, size, partial(theirs, weights, size), ours))
    return contests


def our_blend(weights: np.ndarray, size: int) -> Arrays:
    """A blend by weights."""
    return _csrc.Blender(weights).draw(size)


def megatron_blend(weights: np.ndarray, size: int) -> Arrays:
    """The same blend by megatron-core."""
    arrays = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(*arrays, weights, len(weights), size, False)
    return arrays


def pool_alone(work: Path) -> Blend:
    """Compile tokamake's blend without vectors."""
    library = work.resolve() / "pool_alone.so"
    sources = [_HERE / "pool_alone.cpp", _HERE.parent / "lib" / "csrc" / "blend.cpp"]
    flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["c++", *flags, f"-I{sources[1].parent}", *sources, "-o", library], check=True)
    draw_into = ctypes.CDLL(str(library)).draw
    draw_into.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    ]

    def draw(weights: np.ndarray, size: int) -> Arrays:
        datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        addresses = datasets.ctypes.data, samples.ctypes.data
        draw_into(weights.ctypes.data, len(weights), size, *addresses)
        return datasets, samples

    return draw


def exhaustive_blend() -> Contest:
    """A blend of all samples of the datasets."""
    name = "exhaustive blend, 2,419 sets"
    sizes = np.random.default_rng(0).integers(1, 800, 2419)
    size = int(sizes.sum())

    def theirs() -> Arrays:
        arrays = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_exhaustive_blending_indices(*arrays, sizes, len(sizes))
        return arrays

    return name, size, theirs, lambda: _csrc.Blender.exhaustive(sizes).draw(size)


def sentence_data() -> list[Contest]:
    """Sentence mappings of BERT and T5, and block mappings of ICT; times are per sentence."""
    random = np.random.default_rng(0)
    bounds = np.cumsum(np.append(0, random.integers(0, 40, 500_000)))
    lengths = np.minimum(random.geometric(0.04, bounds[-1]), 512).astype(np.int32)
    titles = random.integers(1, 20, len(bounds) - 1).astype(np.int32)
    data = bounds, lengths
    options: dict[str, Any] = {
        **{"num_epochs": 1, "max_num_samples": _ALL, "max_seq_length": 509, "seed": _SEED},
    }
    return [
        (
            f"sentence mapping, {len(lengths):,} sentences",
            len(lengths),
            lambda: (helpers.build_mapping(*data, 1, _ALL, 509, 0.1, _SEED, False, 1),),
            lambda: (_csrc.build_mapping(*data, **options, short_seq_prob=0.1, min_num_sent=1),),
        ),
        (
            f"block mapping, {len(lengths):,} sentences",
            len(lengths),
            lambda: (
                helpers.build_blocks_mapping(*data, titles, 1, _ALL, 509, _SEED, False, False),
            ),
            lambda: (
                _csrc.build_blocks_mapping(*data, titles, **options, use_one_sent_blocks=False),
            ),
        ),
    ]


def whole_index(documents: int, work: Path) -> Contest:
    """Document, sample and shuffle index of a dataset: from its .idx file to three .npy files."""
    prefix = work / "documents"
    lengths = np.random.default_rng(0).integers(20, 200, documents).astype(np.int32)
    with dataset.IndexWriter(prefix.with_suffix(".idx"), np.uint16) as writer:
        writer.add(lengths, np.ones(documents, np.int32))
        writer.finish()
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(2 * int(lengths.sum(dtype=np.int64)))  # a sparse file: nobody reads tokens
    num_samples = int(lengths.sum(dtype=np.int64)) * 3 // 2 // _LENGTH  # an epoch and a half
    cache = work / "cache"
    return (
        f"index of {documents:,} documents, 1.5 epochs, for each document",
        documents,
        lambda: megatron_index(prefix, num_samples, cache),
        lambda: our_index(prefix, num_samples, work / "ours"),
    )


def megatron_index(prefix: Path, num_samples: int, cache: Path) -> Arrays:
    """Build the index as rank 0 of a training does, including opening the dataset."""
    shutil.rmtree(cache, ignore_errors=True)
    low = IndexedDataset(str(prefix))
    config = GPTDatasetConfig(
        random_seed=_SEED,
        sequence_length=_LENGTH,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=SimpleNamespace(vocab_size=60_000, eod=-2, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    order = np.arange(len(low), dtype=np.int32)
    built = GPTDataset(low, str(prefix), order, num_samples, Split.train, config)
    return built.document_index, built.sample_index, built.shuffle_index


def our_index(prefix: Path, num_samples: int, folder: Path) -> Arrays:
    """Build and write the same index with tokamake."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    opened = dataset.IndexedDataset(prefix)
    built = sample_index.build(
        opened.lengths,
        range(len(opened)),
        num_samples=num_samples,
        sequence_length=_LENGTH,
        seed=_SEED,
    )
    for name, array in built._asdict().items():
        np.save(folder / f"{name}.npy", array)
    return tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in built._fields)


if __name__ == "__main__":
    main()
