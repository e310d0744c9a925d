"""Compare the loader with megatron-core's datasets, in one process, and with the needs of training.

    python benchmarks/loading.py --rounds 5 --metrics results/tiny/training/metrics.jsonl

Datasets of random tokens are made and indexed once. Contestants take turns, round by round, over
the same samples, which are compared first. Printed times are medians.
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
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.index import index
from tokamake.data.samples.steps import batches

_SEED = 1234
_SPLIT = "100,0,0"
_ROWS = 8
"""Samples of a micro batch."""

Batches = Callable[[int], Iterable[Any]]
"""Function of the number of consumed samples that yields the following micro batches."""


class Case(NamedTuple):
    """A mixture and how it is read."""

    length: int
    """Tokens of a sample."""
    files: int
    """Datasets of the mixture."""
    resumed: bool
    """Whether reading starts in the middle."""

    def __str__(self) -> str:
        end = ", resumed" if self.resumed else ""
        return f"{self.length:,} tokens, {self.files} file{'s'[: self.files > 1]}{end}"


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=40_000_000, help="of all datasets together")
    parser.add_argument("--measured", type=int, default=4_000_000, help="tokens read per round")
    parser.add_argument("--open", type=int, default=2500, help="datasets of the opening test")
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of a run of the tiny model")
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    # megatron-core's cache needs a process group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cases = [
        Case(length, files, resumed)
        for length in (256, 4096)
        for files in (1, 40)
        for resumed in (False, True)
    ]
    speeds_of = {case: measure(case, options) for case in cases}
    names = list(next(iter(speeds_of.values())))
    print("\nThousands of tokens per second (samples per second)\n")
    print("| | " + " | ".join([*names, "tokamake / best of the others"]) + " |")
    print("| --- " * (len(names) + 2) + "|")
    for case, speeds in speeds_of.items():
        cells = [f"{speed / 1e3:,.0f} ({speed / case.length:,.0f})" for speed in speeds.values()]
        ours = speeds["tokamake"]
        best = max(speed for name, speed in speeds.items() if name != "tokamake")
        print(f"| {case} | " + " | ".join(cells) + f" | {ours / best:.2f} |")
    report_opening(options)
    if options.metrics:
        report_training(options.metrics, speeds_of)


def measure(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of each contestant: medians over the rounds."""
    folder = make_datasets(
        options.work / f"load-{options.tokens}-{case.files}", case.files, options
    )
    readers = contestants(folder, case, options)
    number = options.measured // case.length // _ROWS
    start = options.tokens // case.length // 2 if case.resumed else 0
    compare(readers, start, number)
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    names = list(readers)
    for turn in range(options.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            assert sum(1 for _ in islice(readers[name](start), number)) == number
            seconds[name].append(time.perf_counter() - begin)
    return {name: number * _ROWS * case.length / median(times) for name, times in seconds.items()}


def make_datasets(folder: Path, number: int, options: argparse.Namespace) -> Path:
    """Write datasets of random tokens (600 per document on average) and their weights, once."""
    if (folder / "weights.txt").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    lines = []
    for file in range(number):
        lengths = rng.integers(1, 1200, options.tokens // number // 600).astype(np.int32)
        with DatasetWriter(
            folder / f"p{file}.bin", folder / f"p{file}.idx", dtype=np.uint16
        ) as writer:
            writer.add(rng.integers(0, 50_000, lengths.sum()).astype(np.uint16), lengths)
        lines.append(f"{rng.random() + 0.5} p{file} corpus\n")
    (folder / "weights.txt").write_text("".join(lines))
    return folder


def contestants(folder: Path, case: Case, options: argparse.Namespace) -> dict[str, Batches]:
    """Megatron's samples one by one, Megatron's batches as in its training, and tokamake's."""
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


def our_samples(folder: Path, length: int, number: int) -> DocumentSamples:
    """Index the datasets, once, and open them."""
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
    return DocumentSamples(output, split="train", data_root=folder)


def megatron_samples(folder: Path, length: int, number: int) -> Any:
    """Index and open the datasets with megatron-core."""
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
    for _ in range(2):  # the first pass builds the cache, the second one maps it, as all ranks do
        builder = BlendedMegatronDatasetBuilder(GPTDataset, [number, 0, 0], lambda: True, settings)
        train, *_ = builder.build()
    return train


def report_opening(options: argparse.Namespace) -> None:
    """Print the time to open a mixture of many datasets that has an index.

    Without megatron-core, which keeps several file descriptors per dataset and runs out of them.
    """
    folder = options.work / f"load-{options.tokens}-{options.open}"
    make_datasets(folder, options.open, options)
    number = options.tokens // 256
    our_samples(folder, 256, number)
    seconds = []
    for _ in range(options.rounds):
        begin = time.perf_counter()
        our_samples(folder, 256, number)
        seconds.append(time.perf_counter() - begin)
    print(f"\nOpening {options.open:,} datasets takes {median(seconds):.2f} s")


def compare(readers: dict[str, Batches], start: int, number: int) -> None:
    """Check that all contestants read the same samples."""
    batches_of = [islice(reader(start), number) for reader in readers.values()]
    count = 0
    for one_by_one, by_loader, ours in zip(*batches_of, strict=True):
        np.testing.assert_array_equal(ours[:, :-1], torch.stack(one_by_one).numpy())
        np.testing.assert_array_equal(ours[:, :-1], by_loader.numpy())
        count += 1
    assert count == number


def report_training(path: Path, speeds_of: dict[Case, dict[str, float]]) -> None:
    """Print the loader's speed as a multiple of the tokens per second of a training."""
    records = map(json.loads, path.read_text().splitlines())
    speed = median(each["tokens_per_second"] for each in records if "tokens_per_second" in each)
    print(f"\nTraining consumes {speed:,.0f} tokens per second ({path}):")
    for case, speeds in speeds_of.items():
        print(f"- {case}: the loader gives {speeds['tokamake'] / speed:,.0f} times as many")


if __name__ == "__main__":
    main()
