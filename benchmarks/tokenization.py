"""Compare tokamake with its peers end to end: from the start of a process until its files exist.

    python benchmarks/tokenization.py --corpus corpus.jsonl --tokenizer GPT2_FOLDER \\
        --megatron MEGATRON_CHECKOUT --sizes 1MB,100MB,1GB --rounds 5

Contestants take turns, round by round. Megatron-LM's two tools are not on PyPI: they need the path
of a checkout. Printed figures are medians; MB/s count bytes of the input.
"""

import argparse
import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import measure
from corpus import in_bytes

_HEADER = struct.Struct("<9sQBQQ")
_SLOW = "preprocess_data.py"

_HERE = Path(__file__).parent
_HUGGING_FACE = {
    "merges.txt": {
        "tokenizer_class": "GPT2Tokenizer",
        **dict.fromkeys(("eos_token", "bos_token", "unk_token"), "<|endoftext|>"),
    },
    "vocab.txt": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
}
_MODEL_TYPES = {"merges.txt": "gpt2", "vocab.txt": "bert"}


class Setting(NamedTuple):
    """Settings that all contestants of a comparison share."""

    tokenizer: Path
    workers: int
    append_eod: bool
    megatron: Path | None
    work: Path


class Contestant(NamedTuple):
    """A program that tokenizes a file."""

    command: Callable[[Path, Path], list[str]]
    """Function of the input file and the output prefix that returns the command."""
    suffix: str
    """Suffix that the program appends to the prefix."""
    environment: dict[str, str]
    """Additional environment variables."""


def contestants(setting: Setting) -> dict[str, Contestant]:
    """All available contestants by name; tokamake is first."""
    eod = ["--append-eod" if setting.append_eod else "--no-append-eod"]
    threads = {"RAYON_NUM_THREADS": str(setting.workers)}
    by_name = {
        "tokamake": Contestant(
            lambda source, prefix: [
                *(sys.executable, "-m", "tokamake", "tokenize", str(source)),
                *("--output", str(prefix), "--tokenizer", str(setting.tokenizer)),
                *("--workers", str(setting.workers), *eod),
            ],
            "",
            {},
        )
    }
    if setting.append_eod and not _holds(setting.tokenizer, "vocab.txt"):
        loop = str(_HERE / "plain_loop.py")
        by_name["plain loop"] = Contestant(
            lambda source, prefix: [
                *(sys.executable, loop, str(source), str(prefix), str(setting.tokenizer))
            ],
            "",
            threads,
        )
    if setting.megatron:
        by_name |= _megatron(setting, setting.megatron)
    return by_name


def _megatron(setting: Setting, checkout: Path) -> dict[str, Contestant]:
    environment = {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    threads = {"RAYON_NUM_THREADS": str(setting.workers)}
    shared = [*_megatron_tokenizer(setting), *(["--append-eod"] if setting.append_eod else [])]

    def command(tool: str, *more: str) -> Callable[[Path, Path], list[str]]:
        start = [sys.executable, str(checkout / "tools" / tool), *shared, *more]
        return lambda source, prefix: [
            *(*start, "--input", str(source), "--output-prefix", str(prefix))
        ]

    slow = command("preprocess_data.py", "--workers", str(setting.workers))
    by_name = {"preprocess_data.py": Contestant(slow, "_text_document", environment)}
    if "HuggingFaceTokenizer" in shared and not _holds(setting.tokenizer, "vocab.txt"):
        # It supports Hugging Face tokenizers only, and gigatoken has no WordPiece.
        fast = command("preprocess_data_fast.py", "--use-gigatoken")
        environment = environment | threads
        by_name["preprocess_data_fast.py"] = Contestant(fast, "_text_document", environment)
    return by_name


def _megatron_tokenizer(setting: Setting) -> list[str]:
    """Megatron's options for a tokenizer; vocabularies become a Hugging Face folder."""
    path = setting.tokenizer
    kind = "--tokenizer-type"
    if path.suffix == ".model" or (path.is_dir() and any(path.glob("*.model"))):
        model = path if path.is_file() else next(path.glob("*.model"))
        return [kind, "Llama2Tokenizer", "--tokenizer-model", str(model)]
    folder = setting.work / "hugging-face"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(path, folder)
    for name, settings in _HUGGING_FACE.items():
        if _holds(path, name):
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
            (folder / "config.json").write_text(json.dumps({"model_type": _MODEL_TYPES[name]}))
    # GPT-2's tokenizer adds no special tokens, and it is faster without this option.
    plain = [] if _holds(path, "merges.txt") else ["--tokenizer-hf-no-include-special-tokens"]
    return [kind, "HuggingFaceTokenizer", "--tokenizer-model", str(folder), *plain]


def _holds(path: Path, name: str) -> bool:
    return (path / name).is_file() and not (path / "tokenizer.json").is_file()


def main() -> None:
    """Measure and print tables."""
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        options.tokenizer,
        options.workers,
        options.append_eod,
        options.megatron,
        options.work.resolve(),
    )
    programs = contestants(setting)
    names = [name for name in programs if name in (options.only or programs)]
    runs = []
    for number in range(options.rounds):
        for size in options.sizes:
            for name in _rotated(names, number):
                source = slice_of(options.corpus, _own_size(name, size, options), options.work)
                cost = run(programs[name], source, options.work)
                runs.append({"size": size, "name": name, **cost})
                print(_line(number, runs[-1]), flush=True)
    print(report(runs, options))
    if options.json:
        options.json.write_text(json.dumps(runs, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl file, key text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="as for tokamake tokenize")
    parser.add_argument("--megatron", type=Path, help="Megatron-LM checkout with its tools/")
    parser.add_argument("--sizes", type=_sizes, default="1MB,100MB,1GB", help="of the input")
    parser.add_argument(
        "--slow-bytes", type=in_bytes, default="100MB", help=f"largest input of {_SLOW}"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--append-eod", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", action="append", help="name of a contestant; repeatable")
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    return parser.parse_args()


def _sizes(text: str) -> list[int]:
    return [in_bytes(part) for part in text.split(",")]


def _rotated(names: list[str], by: int) -> list[str]:
    return [names[(place + by) % len(names)] for place in range(len(names))]


def _own_size(name: str, size: int, options: argparse.Namespace) -> int:
    return min(size, options.slow_bytes) if name == _SLOW else size


def slice_of(corpus: Path, size: int, work: Path) -> Path:
    """Write the first lines of the corpus, about `size` bytes, once, and read them into memory."""
    path = work / f"{corpus.stem}-{size}.jsonl"
    if not path.exists():
        with corpus.open("rb") as source, path.open("wb") as target:
            for line in source:
                if target.tell() and target.tell() + len(line) > size:
                    break
                target.write(line)
            if target.tell() < 0.9 * size:
                raise SystemExit(f"{corpus}: {target.tell():,} bytes, less than {size:,}")
    with path.open("rb") as stream:
        while stream.read(1 << 24):
            pass
    return path


def run(contestant: Contestant, source: Path, work: Path) -> dict[str, Any]:
    """Run a contestant once and return its cost, its number of documents and the output's hash."""
    folder = work / "output"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()  # pending writes of the previous run must not slow this one down
    log = work / "log.txt"
    command = contestant.command(source, folder / "shard")
    cost = measure.run(command, log=log, environment=contestant.environment)
    result = {**cost._asdict(), "bytes": source.stat().st_size, "expected": _lines(source)}
    prefix = folder / f"shard{contestant.suffix}"
    idx = Path(f"{prefix}.idx")
    if cost.status or not idx.exists():
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        return {**result, "documents": 0, "hash": "", "failure": " ".join(last) or "no index"}
    header = _HEADER.unpack(idx.read_bytes()[: _HEADER.size])
    digest = hashlib.sha256()
    for path in (Path(f"{prefix}.bin"), idx):
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return {**result, "documents": header[4] - 1, "hash": digest.hexdigest()[:8], "failure": ""}


def _lines(path: Path) -> int:
    with path.open("rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 24), b""))


def _line(number: int, run: dict[str, Any]) -> str:
    speed = run["bytes"] / 1e6 / run["seconds"]
    return (
        f"round {number + 1}  {run['size'] / 1e6:>6,.0f} MB  {run['name']:<24}"
        f"{run['seconds']:>9.2f} s {speed:>8.1f} MB/s  {run['failure']}"
    )


def report(runs: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Format the medians as Markdown, one table per size."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        f"{now}, {options.workers} workers, {options.rounds} rounds, {_processor()}, "
        f"tokenizer {options.tokenizer.name}"
    ]
    for size in options.sizes:
        rows = list(_rows([run for run in runs if run["size"] == size]))
        parts += [f"### {size / 1e6:,.0f} MB", _table(rows)]
    return "\n\n" + "\n\n".join(parts)


def _rows(runs: list[dict[str, Any]]) -> Iterator[list[str]]:
    names = list(dict.fromkeys(run["name"] for run in runs))
    speeds = {
        name: median(run["bytes"] / run["seconds"] for run in runs if run["name"] == name)
        for name in names
    }
    failures = {run["name"]: run["failure"] for run in runs if run["failure"]}
    for name in sorted(names, key=lambda name: -speeds[name]):
        own = [run for run in runs if run["name"] == name]
        times = [run["seconds"] for run in own]
        first = own[0]
        failure = failures.get(name, "")
        yield [
            name
            if first["bytes"] > 0.9 * first["size"]
            else f"{name} on {first['bytes'] / 1e6:.0f} MB",
            f"{median(times):.2f} ({min(times):.2f}–{max(times):.2f})",
            f"{speeds[name] / 1e6:.1f}",
            _times(speeds, name, failure or failures.get("tokamake", "")),
            f"{median(run['cpu_seconds'] for run in own):.2f}",
            f"{median(run['peak_bytes'] for run in own) / 1e6:,.0f}",
            f"{min(run['documents'] for run in own):,} of {first['expected']:,}",
            failure or "/".join(sorted({run["hash"] for run in own})),
        ]


def _times(speeds: dict[str, float], name: str, failure: str) -> str:
    """Speed of tokamake as a multiple of the contestant's."""
    return (
        "–" if failure or "tokamake" not in speeds else f"{speeds['tokamake'] / speeds[name]:.2f}×"
    )


def _table(rows: list[list[str]]) -> str:
    header = [
        "",
        "seconds (from–to)",
        "MB/s",
        "tokamake is",
        "CPU s",
        "peak MB",
        "documents",
        "hash",
    ]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return os.uname().machine


if __name__ == "__main__":
    main()
