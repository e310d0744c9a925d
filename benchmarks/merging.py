"""Compare `tokamake merge` with `cat` and with Megatron's merge, including the sync to disk.

    python benchmarks/merging.py --bytes 2GB --parts 20 --rounds 5 --work benchmark-work

Contestants take turns, round by round. Printed times are medians; "tokamake is" is the median of
the ratios of each round, which a busy machine affects less. Each contestant is timed from the start
of its process until its files are on disk. The shards are made here, from random tokens, with
manifests.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import measure
import numpy as np
from corpus import in_bytes

from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.indexed.manifest import sizes_and_hashes, write_manifest
from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path

_MEGATRON = """
import gc, numpy, os, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
output, *prefixes = sys.argv[1:]
builder = IndexedDatasetBuilder(output + ".bin", dtype=numpy.uint16)
for prefix in prefixes:
    builder.add_index(prefix)
builder.finalize(output + ".idx")
for suffix in (".bin", ".idx"):
    with open(output + suffix, "rb") as stream:
        os.fsync(stream.fileno())
"""
"""The work of Megatron's merge_datasets.py, without its search for files."""


def main() -> None:
    """Measure and print a table."""
    options = _options()
    shards = make_shards(options)
    commands = contestants(shards, options.work / "output")
    names = [name for name in commands if name in (options.only or commands)]
    runs = []
    for number in range(options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            cost = run(commands[name], shards, options.work)
            runs.append({"round": number, "name": name, **cost})
            print(f"round {number + 1}  {name:<32}{cost['seconds']:>8.2f} s", flush=True)
    print(report(runs, options))
    if options.json:
        options.json.write_text(json.dumps(runs, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=in_bytes, default="2GB", help="of all .bin files")
    parser.add_argument("--parts", type=int, default=20, help="shards to merge")
    parser.add_argument("--mean-tokens", type=int, default=1000, help="of a document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="name of a contestant; repeatable")
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    return parser.parse_args()


def make_shards(options: argparse.Namespace) -> list[Path]:
    """Write shards of random tokens, once, and return their prefixes."""
    name = f"merge-{options.bytes}-{options.parts}-{options.mean_tokens}"
    folder = options.work / name
    prefixes = [folder / f"part-{number:04d}" for number in range(options.parts)]
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for prefix in prefixes:
        if not manifest_path(prefix).exists():
            _make_shard(prefix, options.bytes // options.parts // 2, options.mean_tokens, rng)
    return prefixes


def _make_shard(prefix: Path, tokens: int, mean: int, rng: np.random.Generator) -> None:
    paths = bin_path(prefix), idx_path(prefix)
    with DatasetWriter(*paths, dtype=np.uint16) as writer:
        while writer.index.tokens < tokens:
            lengths = rng.integers(1, 2 * mean, 10_000_000 // mean).astype(np.int32)
            ends = lengths.cumsum()
            lengths = lengths[: np.searchsorted(ends, tokens - writer.index.tokens) + 1]
            writer.add(rng.integers(0, 50_000, lengths.sum()).astype(np.uint16), lengths)
    index = writer.index
    counts = {"documents": index.documents, "sequences": index.sequences, "tokens": index.tokens}
    manifest = {"inputs": [], "dtype": "uint16", **counts, **sizes_and_hashes(*paths)}
    write_manifest(manifest_path(prefix), manifest)


def contestants(shards: list[Path], folder: Path) -> dict[str, list[str]]:
    """Commands that write the merged dataset, or only its .bin, into `folder`."""
    names = list(map(str, shards))
    files = shlex.join(f"{name}.bin" for name in names)
    output = str(folder / "merged")
    binary = shlex.quote(f"{output}.bin")
    tool = str(Path(sys.executable).with_name("tokamake"))
    # Without manifests, merge cannot compare hashes, but it still computes them.
    bare = folder.parent / "bare"
    _without_manifests(shards, bare)
    return {
        "cat, .bin alone": ["sh", "-c", f"cat {files} > {binary} && sync {binary}"],
        "tokamake merge": [tool, "merge", *names, "--output", output],
        "tokamake merge, no manifests": [tool, "merge", str(bare), "--output", output],
        "Megatron's merge": [sys.executable, "-c", _MEGATRON, output, *names],
    }


def _without_manifests(shards: list[Path], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for shard in shards:
        for path in (bin_path(shard), idx_path(shard)):
            (folder / path.name).hardlink_to(path)


def run(command: list[str], shards: list[Path], work: Path) -> dict[str, Any]:
    """Run a contestant once, with its input in memory, and return its cost and output hashes."""
    folder = work / "output"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()  # pending writes of the previous run must not slow this one down
    for shard in shards:
        for path in (bin_path(shard), idx_path(shard)):
            with path.open("rb") as stream:
                while stream.read(1 << 24):
                    pass
    log = work / "log.txt"
    cost = measure.run(command, log=log, environment={})
    if cost.status:
        raise SystemExit(f"{command[0]}: {log.read_text()}")
    written = [path for path in (folder / "merged.bin", folder / "merged.idx") if path.exists()]
    size = sum(path.stat().st_size for path in written)
    return {**cost._asdict(), "bytes": size, "hash": "/".join(map(_hash, written))}


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:8]


def report(runs: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Format the medians as a Markdown table."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    ours = {run["round"]: run["seconds"] for run in runs if run["name"] == "tokamake merge"}
    lines = [
        f"\n{now}, {options.bytes / 1e9:g} GB in {options.parts} shards, documents of "
        f"{options.mean_tokens:,} tokens, {options.rounds} rounds\n",
        "| | seconds (from–to) | MB/s | tokamake is | CPU s | peak MB | hashes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(run["name"] for run in runs):
        own = [run for run in runs if run["name"] == name]
        times = [run["seconds"] for run in own]
        cells = [
            name,
            f"{median(times):.2f} ({min(times):.2f}–{max(times):.2f})",
            f"{own[0]['bytes'] / 1e6 / median(times):,.0f}",
            f"{median(run['seconds'] / ours[run['round']] for run in own):.2f}×" if ours else "–",
            f"{median(run['cpu_seconds'] for run in own):.2f}",
            f"{median(run['peak_bytes'] for run in own) / 1e6:,.0f}",
            ", ".join(sorted({run["hash"] for run in own})),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
