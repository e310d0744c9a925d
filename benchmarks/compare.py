"""Compare two checkouts of tokamake: the same commands in turns, medians and their ratio.

    python benchmarks/compare.py --before ../old --after . --corpus corpus.jsonl --tokenizer gpt2 \
        --work DIR --rounds 5

Each checkout has its own .venv (`make install`). The first one writes the inputs once. The bytes
that the two write must be equal.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import measure
import planning

_LLAMA = """\
family: llama
hidden_size: 512
intermediate_size: 1408
num_hidden_layers: 8
num_attention_heads: 8
num_key_value_heads: 4
max_position_embeddings: 512
"""
"""25 million parameters, and twice 26 million of embeddings with GPT-2's vocabulary."""
_SETTINGS = json.dumps(
    {
        "sequence_length": 512,
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "train_steps": 16,
        "split": "100,0,0",
    }
)
_PARTS = 8
_LOADER = """
import sys
from pathlib import Path
import numpy as np
from tokamake.data.samples.loader import open_samples
samples = open_samples(Path("index"), split="train", data_root=Path("."))
rows = (np.stack([samples[first + row] for row in range(8)]) for first in range(0, 160_000, 8))
total = sum(int(batch.sum()) for batch in rows)
Path(sys.argv[1]).write_text(str(total))
"""
_PREPARE = [
    "tokenize {corpus} --tokenizer {tokenizer} --output parts/0",
    "index --weights weights.txt --sequence-length 512 --train-samples 300000 --valid-samples 0 "
    "--split 100,0,0 --seed 1 --output index",
    "init-model --architecture llama.yaml --tokenizer {tokenizer} --seed 1 --output hf",
    "convert --from hf --to native --format native",
    "resolve --settings {settings} --run compared --seed 1 --checkpoint native --index index "
    "--data-root . --output-folder output/training --output run.yaml",
]
_STAGES = {
    "tokenize": "tokenize {corpus} --tokenizer {tokenizer} --output output/data",
    "merge": "merge " + " ".join(f"parts/{part}" for part in range(_PARTS)) + " --output output/d",
    "index": _PREPARE[1].removesuffix("index") + "output/index",
    "convert": "convert --from hf --to output/mds --format mds --tensor-parallel-size 2",
    "train": "train --config run.yaml",
}


def main() -> None:
    """Measure and print a table."""
    options = _options()
    work = options.work.resolve()
    (work / "parts").mkdir(parents=True, exist_ok=True)
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    values = {
        "corpus": options.corpus.resolve(),
        "tokenizer": options.tokenizer.resolve(),
        "settings": _SETTINGS,
    }
    write_inputs(work, checkouts["before"], values)
    print("| | before, s (from–to) | after, s (from–to) | after / before | CPU s | peak MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.only or [*_STAGES, "loader", "dry run"]:
        if name == "dry run":
            planning.make_folder(work / "planned", options.files)
        costs, steps = [], []
        for cost in in_turns(name, checkouts, work, values, options.rounds):
            costs.append(cost)
            if name == "train":  # the next round replaces the folders
                steps.append(step_cost(cost))
        print(row(name, costs), flush=True)
        if steps:
            print(row("step of training", steps), flush=True)


def write_inputs(work: Path, checkout: Path, values: dict[str, object]) -> None:
    """Write what the stages read, once."""
    if (work / "run.yaml").exists():
        return
    (work / "llama.yaml").write_text(_LLAMA)
    (work / "loader.py").write_text(_LOADER)
    lines = [f"{part + 1} parts/{part} corpus\n" for part in range(_PARTS)]
    (work / "weights.txt").write_text("".join(lines))
    for line in _PREPARE:
        subprocess.run(command(line, checkout, values), cwd=work, check=True)
        for path in list((work / "parts").glob("0.*")):
            for part in range(1, _PARTS):
                copy = path.with_name(f"{part}{path.suffix}")
                copy.exists() or copy.hardlink_to(path)


def command(line: str, checkout: Path, values: dict[str, object]) -> list[str]:
    """Return the arguments of a stage's line, run by the checkout's tokamake."""
    tool = str(checkout / ".venv/bin/tokamake")
    return [tool, *(word.format_map(values) for word in line.split())]


def in_turns(
    name: str, checkouts: dict[str, Path], work: Path, values: dict[str, object], rounds: int
) -> Iterator[dict[str, tuple[measure.Cost, Path]]]:
    """Run a stage with each checkout, round by round; yield costs and output folders.

    Raises:
        SystemExit: a run failed, or the two wrote different bytes.
    """
    for number in range(rounds):
        costs, digests = {}, set()
        # The first of a round is not always the same.
        for side in sorted(checkouts, reverse=number % 2 == 1):
            output, kept = work / "output", work / f"output-{side}"
            for folder in (output, kept):
                shutil.rmtree(folder, ignore_errors=True)
            output.mkdir()
            os.sync()  # what the run before has not written yet does not count here
            line = stage_command(name, checkouts[side], work, values)
            os.chdir(work)
            cost = measure.run(line, log=work / "log", environment={"OMP_NUM_THREADS": "2"})
            if cost.status:
                raise SystemExit(f"{side}, {name}: {(work / 'log').read_text()[-3000:]}")
            output.rename(kept)
            costs[side] = cost, kept
            digests.add(digest(kept))
        if len(digests) > 1:
            raise SystemExit(f"{name}: the files of {work}/output-before and -after differ")
        yield costs


def stage_command(name: str, checkout: Path, work: Path, values: dict[str, object]) -> list[str]:
    """Return the arguments that run a stage with a checkout."""
    if name == "loader":
        return [str(checkout / ".venv/bin/python"), "loader.py", "output/total"]
    if name == "dry run":
        return planning.command(work / "planned", "-n", planning.TARGET, checkout=checkout)
    return command(_STAGES[name], checkout, values)


def digest(folder: Path) -> str:
    """Hash the binary files, which hold no paths, times or names of programs."""
    sha256 = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".bin", ".idx", ".npy", ".distcp"} or path.name == "total":
            sha256.update(f"{path.relative_to(folder)} {path.stat().st_size}".encode())
            with path.open("rb") as stream:
                sha256.update(hashlib.file_digest(stream, "sha256").digest())
    return sha256.hexdigest()


def step_cost(costs: dict[str, tuple[measure.Cost, Path]]) -> dict[str, tuple[measure.Cost, Path]]:
    """Replace the seconds of a training by those of its mean step."""
    steps = {}
    for side, (cost, folder) in costs.items():
        summary = json.loads((folder / "train.json").read_text())
        seconds = summary["seconds"] / summary["step"]
        steps[side] = cost._replace(seconds=seconds), folder
    return steps


def row(name: str, costs: list[dict[str, tuple[measure.Cost, Path]]]) -> str:
    """Return a row of the table; the ratio is the median of the rounds' ratios."""
    cells = [name]
    for side in ("before", "after"):
        times = [cost[side][0].seconds for cost in costs]
        cells.append(f"{median(times):.2f} ({min(times):.2f}–{max(times):.2f})")
    ratios = [cost["after"][0].seconds / cost["before"][0].seconds for cost in costs]
    cells.append(f"{median(ratios):.2f}")
    for field, scale, digits in (("cpu_seconds", 1, 1), ("peak_bytes", 1e6, 0)):
        both = (median(getattr(c[side][0], field) for c in costs) / scale for side in costs[0])
        cells.append(" → ".join(f"{value:,.{digits}f}" for value in both))
    return "| " + " | ".join(cells) + " |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="a checkout")
    parser.add_argument("--after", type=Path, required=True, help="another checkout")
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl file, see corpus.py")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--files", type=int, default=100_000, help="raw files of the dry run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="a row of the table; repeatable")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
