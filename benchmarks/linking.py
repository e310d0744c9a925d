"""Measure how fast existing indexed datasets are verified and opened.

    python benchmarks/linking.py --bytes 10GB --datasets 2500 --rounds 3 --work benchmark-work

Makes datasets of random tokens without manifests, as other programs leave them, and a list with
their weights. Measures, with the files in memory:

- `sha256sum` of all .bin files, and the first verification by `tokamake merge-batch`, each in one
  process on one core, in turns;
- the same command again, when all is verified;
- opening all datasets in Python, here and with megatron-core.

Printed times are medians.
"""

import argparse
import shutil
import sys
from pathlib import Path
from statistics import median

import measure
import numpy as np
from corpus import in_bytes

from tokamake.config.data import PlanSettings
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import write_plan
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.mixture.weigh import read_listed_corpora

VOCAB_SIZE = 32_000
EOD = 2
_OPEN = {
    "tokamake": """
import sys
from pathlib import Path
from tokamake.data.indexed.dataset import IndexedDataset
datasets = [IndexedDataset(Path(prefix)) for prefix in sys.argv[1:]]
assert sum(len(dataset) for dataset in datasets)
""",
    "megatron-core": """
import sys
from megatron.core.datasets.indexed_dataset import IndexedDataset
datasets = [IndexedDataset(prefix) for prefix in sys.argv[1:]]
assert sum(len(dataset) for dataset in datasets)
""",
}


def main() -> None:
    """Measure and print a line for each command."""
    options = _options()
    folder = options.work / f"linking-{options.bytes}-{options.datasets}"
    prefixes = make_datasets(folder / "pre", options.datasets, size=options.bytes)
    plan_links(folder, prefixes)
    for prefix in prefixes:  # into memory
        Path(f"{prefix}.bin").read_bytes()
    binaries = [f"{prefix}.bin" for prefix in prefixes]
    commands = {"sha256sum": ["sha256sum", *binaries], "first verification": []}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(options.rounds):
        for name, command in commands.items():
            # A new folder each time: ext4 is slow to use inodes again that were just deleted.
            times[name].append(_seconds(command or _merge(folder, f"merged-{number}"), folder))
    again = {
        "second verification": _merge(folder, "merged-0"),
        **{
            f"open, {name}": [sys.executable, "-c", text, *prefixes] for name, text in _OPEN.items()
        },
    }
    for name, command in again.items():
        times[name] = [_seconds(command, folder) for _ in range(options.rounds)]
    for number in range(options.rounds):
        shutil.rmtree(folder / f"merged-{number}")
    for name, seconds in times.items():
        rate = options.bytes / median(seconds) / 1e9
        shown = f"{rate:6.2f} GB/s" if name in commands else ""
        print(
            f"{name:<24}{median(seconds):7.2f} s {shown}  ({min(seconds):.2f}-{max(seconds):.2f})"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=in_bytes, default="10GB", help="of all .bin files")
    parser.add_argument("--datasets", type=int, default=2500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    return parser.parse_args()


def make_datasets(folder: Path, count: int, *, size: int) -> list[str]:
    """Write datasets of random tokens, once; return their prefixes."""
    prefixes = [str(folder / f"web-{number:04d}_text_document") for number in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    tokens_each, length = size // count // 2, 1000
    tokens = random.integers(0, VOCAB_SIZE, tokens_each // length * length, dtype=np.uint16)
    tokens[length - 1 :: length] = EOD
    lengths = np.full(len(tokens) // length, length)
    for number, prefix in enumerate(prefixes):
        files = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        if not files[1].exists():
            with DatasetWriter(*files, dtype=np.uint16) as writer:
                writer.add(np.roll(tokens, number * length), lengths)
    return prefixes


def plan_links(folder: Path, prefixes: list[str]) -> None:
    """Write a list, a plan of one job that links to its datasets, and a tokenizer."""
    weights = folder / "list.txt"
    weights.write_text("".join(f"1 {Path(prefix).resolve()} web\n" for prefix in prefixes))
    corpora = read_listed_corpora(weights, None)
    write_plan(folder / "plan.json", make_plan(corpora, PlanSettings(max_jobs=1), declared={}))
    if not (folder / "ids").exists():
        train_tokenizer(kind="ids", vocab_size=VOCAB_SIZE, eod=EOD, output=folder / "ids")


def _merge(folder: Path, output: str) -> list[str]:
    tokamake = str(Path(sys.executable).with_name("tokamake"))
    files = {"plan": "plan.json", "input": "shards", "output": output, "summary": "batch.json"}
    named = [f"--{name}={folder / file}" for name, file in files.items()]
    return [tokamake, "merge-batch", *named, "--batch=web-00000", f"--tokenizer={folder / 'ids'}"]


def _seconds(command: list[str], folder: Path) -> float:
    log = folder / "log"
    cost = measure.run(["taskset", "-c", "0", *command], log=log, environment={})
    assert cost.status == 0, log.read_text()
    return cost.seconds


if __name__ == "__main__":
    main()
