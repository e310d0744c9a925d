"""Compare converting a checkpoint with copying its bytes, and with transformers' load and save.

    python benchmarks/checkpoints.py --work DIR --rounds 5

The model is a Llama of 223 million parameters in fp32, 0.9 GB. Contestants are separate processes
that take turns; files are synced. Times are medians. Memory is the largest resident set, including
file pages that the kernel may drop.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

MAKE = """
import sys
from pathlib import Path
from tokamake.checkpoint import writer
from tokamake.checkpoint.random_source import RandomSource
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.config.architecture import Architecture
shape = Architecture(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=14,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=2048,
)
folder = Path(sys.argv[1])
source = Checkpoint("hf", folder, shape, RandomSource(shape, seed=0))
writer.write(folder, source, "hf", Target(), workers=1)
"""
THROUGH_TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2])
"""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    source, target = options.work / "source", options.work / "target"
    if not source.exists():
        # In another process, because children inherit the resident set of this one.
        subprocess.run([sys.executable, "-c", MAKE, str(source)], check=True)
    tokamake = [str(Path(sys.executable).parent / "tokamake"), "convert", "--from", str(source)]
    contestants = {
        "cp": ["cp", "-r", str(source), str(target)],
        "transformers": [
            sys.executable, "-c", THROUGH_TRANSFORMERS, str(source), str(target),
        ],
        "to hf": [*tokamake, "--to", str(target), "--format", "hf"],
        "to mds, 2 ranks": [
            *tokamake, "--to", str(target), "--format", "mds", "--tensor-parallel-size", "2",
        ],
        "to native": [*tokamake, "--to", str(target), "--format", "native"],
    }  # fmt: skip
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    order = random.Random(0)
    for _ in range(options.rounds):
        # In random order: after the largest process, memory is requested from the host again.
        for name in order.sample([*contestants], len(contestants)):
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            costs[name].append(measure(contestants[name], target))
    shutil.rmtree(target)
    cp_seconds = median(seconds for seconds, _ in costs["cp"])
    print("| | seconds | of cp's speed | MB |\n|---|---|---|---|")
    for name, rounds in costs.items():
        seconds, memory = (median(values) for values in zip(*rounds, strict=True))
        print(f"| {name} | {seconds:.1f} | {cp_seconds / seconds:.2f} | {memory:,.0f} |")


def measure(command: list[str], target: Path) -> tuple[float, float]:
    """Seconds and megabytes of a process, until its files are on disk."""
    # Write bytecode, as by default: installed packages have theirs, tokamake must have it, too.
    bytecode = "PYTHONDONTWRITEBYTECODE"
    environment = {key: value for key, value in os.environ.items() if key != bytecode}
    begin, quiet = time.perf_counter(), subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    for path in target.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - begin, usage.ru_maxrss / 1000


if __name__ == "__main__":
    main()
