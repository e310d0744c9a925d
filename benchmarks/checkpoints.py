"""Compare converting a checkpoint with copying its bytes, and with transformers' load and save.

    python benchmarks/checkpoints.py --work DIR --rounds 5

The model is a Llama of 223 million parameters in fp32, 0.9 GB. Each contestant is a process of its
own, in turns; files are synced. Times are medians, memory is the largest resident set, of which
file pages that the kernel may drop are a part.
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
import torch
from tokamake.checkpoint import hugging_face, tensors
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
generator = torch.Generator().manual_seed(0)
weights = {
    name: torch.randn(tuple(size), generator=generator) * 0.02
    for name, size in tensors.shapes(shape).items()
}
hugging_face.write(Path(sys.argv[1]), shape, weights)
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
    given = parser.parse_args()
    source, target = given.work / "source", given.work / "target"
    if not source.exists():
        # In another process: what this one holds would count as that of those it starts.
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
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    order = random.Random(0)
    for _ in range(given.rounds):
        # Whoever comes after the largest process finds memory that is given back to the host.
        for name in order.sample([*contestants], len(contestants)):
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            found[name].append(measure(contestants[name], target))
    shutil.rmtree(target)
    copied = median(seconds for seconds, _ in found["cp"])
    print("| | seconds | of cp's speed | MB |\n|---|---|---|---|")
    for name, some in found.items():
        seconds, memory = (median(values) for values in zip(*some, strict=True))
        print(f"| {name} | {seconds:.1f} | {copied / seconds:.2f} | {memory:,.0f} |")


def measure(command: list[str], target: Path) -> tuple[float, float]:
    """Seconds and megabytes of a process, until what it wrote is on disk."""
    # Bytecode is kept, as anywhere: else our modules would be compiled anew each time, those of
    # others not.
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    begin, quiet = time.perf_counter(), subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=kept) as process:
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
