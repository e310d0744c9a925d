"""Compare the loader with megatron-core's datasets, in one process, and with what training takes.

    python benchmarks/loading.py --rounds 5 --metrics results/tiny/checkpoints/metrics.jsonl

Pairs of random tokens are made and indexed once. Contestants take turns, round by round, over the
same samples, which are compared before; medians are printed.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import DataLoader

from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.samples.index import index
from tokamake.data.samples.loader import Samples, batches

_SEED = 1234
_SPLIT = "100,0,0"
_ROWS = 8
"""Samples of a micro batch."""

Batches = Callable[[int], Iterable[Any]]
"""Yields micro batches from some number of consumed samples on."""


class Case(NamedTuple):
    """What is read."""

    length: int
    """Tokens of a sample."""
    files: int
    resumed: bool
    """Whether half of the samples were consumed before."""

    def __str__(self) -> str:
        end = ", resumed" if self.resumed else ""
        return f"{self.length:,} tokens, {self.files} file{'s'[: self.files > 1]}{end}"


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=40_000_000, help="of all files together")
    parser.add_argument("--measured", type=int, default=4_000_000, help="tokens read each time")
    parser.add_argument("--open", type=int, default=2500, help="pairs whose opening is measured")
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of the run of the tiny model")
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    # megatron-core asks for the rank where it caches.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cases = [
        Case(length, files, resumed)
        for length in (256, 4096)
        for files in (1, 40)
        for resumed in (False, True)
    ]
    found = {case: measure(case, options) for case in cases}
    names = list(next(iter(found.values())))
    print("\nThousands of tokens a second (samples a second)\n")
    print("| | " + " | ".join([*names, "tokamake / best of the others"]) + " |")
    print("| --- " * (len(names) + 2) + "|")
    for case, speeds in found.items():
        cells = [f"{speed / 1e3:,.0f} ({speed / case.length:,.0f})" for speed in speeds.values()]
        ours = speeds["tokamake"]
        best = max(speed for name, speed in speeds.items() if name != "tokamake")
        print(f"| {case} | " + " | ".join(cells) + f" | {ours / best:.2f} |")
    report_opening(options)
    if options.metrics:
        report_training(options.metrics, found)


def measure(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of each contestant: medians over the rounds."""
    folder = make_pairs(options.work / f"load-{options.tokens}-{case.files}", case.files, options)
    found = contestants(folder, case, options)
    number = options.measured // case.length // _ROWS
    start = options.tokens // case.length // 2 if case.resumed else 0
    compare(found, start, number)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    names = list(found)
    for turn in range(options.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            assert sum(1 for _ in islice(found[name](start), number)) == number
            seconds[name].append(time.perf_counter() - begin)
    return {name: number * _ROWS * case.length / median(times) for name, times in seconds.items()}


def make_pairs(folder: Path, number: int, options: argparse.Namespace) -> Path:
    """Write pairs of documents of 600 random tokens on average, and their weights, once."""
    if (folder / "weights.txt").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    lines = []
    for file in range(number):
        lengths = rng.integers(1, 1200, options.tokens // number // 600).astype(np.int32)
        with DatasetWriter(folder / f"p{file}.bin", folder / f"p{file}.idx", np.uint16) as writer:
            writer.add(rng.integers(0, 50_000, lengths.sum()).astype(np.uint16), lengths)
        lines.append(f"{rng.random() + 0.5} p{file} corpus\n")
    (folder / "weights.txt").write_text("".join(lines))
    return folder


def contestants(folder: Path, case: Case, options: argparse.Namespace) -> dict[str, Batches]:
    """Megatron's samples one by one, in batches as its training reads them, and ours."""
    number = options.tokens // case.length
    ours = our_samples(folder, case.length, number)
    theirs = megatron_samples(folder, case.length, number)
    assert len(ours) == len(theirs)

    def by_loader(start: int) -> Iterator[torch.Tensor]:
        order = range(start, len(theirs) - _ROWS + 1, _ROWS)
        rows = [range(first, first + _ROWS) for first in order]
        return (batch["tokens"] for batch in DataLoader(theirs, batch_sampler=rows))

    def one_by_one(start: int) -> Iterator[list[Any]]:
        for first in range(start, len(theirs) - _ROWS + 1, _ROWS):
            yield [theirs[number]["tokens"] for number in range(first, first + _ROWS)]

    def tokamake(start: int) -> Iterator[Any]:
        return batches(
            ours,
            consumed_samples=start,
            micro_batch_size=_ROWS,
            data_parallel_rank=0,
            data_parallel_size=1,
        )

    return {
        "megatron-core, samples": one_by_one,
        "megatron-core, DataLoader": by_loader,
        "tokamake": tokamake,
    }


def our_samples(folder: Path, length: int, number: int) -> Samples:
    """Index the pairs, once, and open them."""
    output = folder / f"index-{length}"
    if not output.exists():
        index(
            weights=folder / "weights.txt",
            sequence_length=length,
            train_samples=number,
            valid_samples=0,
            split=_SPLIT,
            seed=_SEED,
            output=output,
        )
    return Samples(output, split="train", data_root=folder)


def megatron_samples(folder: Path, length: int, number: int) -> Any:
    """The same by megatron-core."""
    lines = [line.split() for line in (folder / "weights.txt").read_text().splitlines()]
    prefixes = [str(folder / prefix) for _, prefix, _ in lines]
    settings = GPTDatasetConfig(
        random_seed=_SEED,
        sequence_length=length,
        blend=(prefixes, [float(weight) for weight, *_ in lines]),
        split=_SPLIT,
        path_to_cache=str(folder / "cache"),
        tokenizer=SimpleNamespace(vocab_size=60_000, eod=-2, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    for _ in range(2):  # a job builds its cache, then all ranks read it memory-mapped
        builder = BlendedMegatronDatasetBuilder(GPTDataset, [number, 0, 0], lambda: True, settings)
        train, *_ = builder.build()
    return train


def report_opening(options: argparse.Namespace) -> None:
    """Print how long it takes to open a mixture of many pairs that is indexed already.

    megatron-core takes no part: it runs out of file descriptors, of which it keeps several a pair.
    """
    folder = options.work / f"load-{options.tokens}-{options.open}"
    make_pairs(folder, options.open, options)
    number = options.tokens // 256
    our_samples(folder, 256, number)
    seconds = []
    for _ in range(options.rounds):
        begin = time.perf_counter()
        our_samples(folder, 256, number)
        seconds.append(time.perf_counter() - begin)
    print(f"\nOpening {options.open:,} pairs takes {median(seconds):.2f} s")


def compare(found: dict[str, Batches], start: int, number: int) -> None:
    """Have all that is measured read by all and be the same."""
    made = [islice(one(start), number) for one in found.values()]
    count = 0
    for one_by_one, by_loader, ours in zip(*made, strict=True):
        np.testing.assert_array_equal(ours[:, :-1], torch.stack(one_by_one).numpy())
        np.testing.assert_array_equal(ours[:, :-1], by_loader.numpy())
        count += 1
    assert count == number


def report_training(path: Path, found: dict[Case, dict[str, float]]) -> None:
    """Print how many times what the run took the loader gives, at the run's sequence length."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    taken = median(one["tokens_per_second"] for one in records if "tokens_per_second" in one)
    print(f"\nTraining takes {taken:,.0f} tokens a second ({path}):")
    for case, speeds in found.items():
        print(f"- {case}: the loader gives {speeds['tokamake'] / taken:,.0f} times as many")


if __name__ == "__main__":
    main()
