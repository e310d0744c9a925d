"""Compare the default run's validation losses in each number format with those in fp32.

    python benchmarks/precision.py

It runs the workflow's target `train` in this folder for config/config.yaml with each
`train.precision`, as runs precision-fp32, precision-bf16 and precision-fp16, of which those that
are done already are not done again.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

FORMATS = ("fp32", "bf16", "fp16")


def main() -> None:
    """Train and print a table."""
    losses = {name: trained(name) for name in FORMATS}
    steps = [*losses["fp32"]]
    print(f"| validation loss at step | {' | '.join(map(str, steps))} |")
    print("|---" * (len(steps) + 1) + "|")
    for name, found in losses.items():
        print(f"| {name} | {' | '.join(f'{found[step]:.4f}' for step in steps)} |")
    for name in FORMATS[1:]:
        most = max(abs(losses[name][step] / losses["fp32"][step] - 1) for step in steps)
        print(f"{name}: no more than {most:.2%} from fp32")


def trained(precision: str) -> dict[int, float]:
    """Validation losses by step of the default run in a number format."""
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    config["run"] = f"precision-{precision}"
    config["train"]["precision"] = precision
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        snakemake = str(Path(sys.executable).with_name("snakemake"))
        command = [snakemake, "--profile", "profiles/local", "train", "--configfile", str(file)]
        subprocess.run(command, check=True)
    metrics = Path("results", config["run"], "training", "metrics.jsonl")
    lines = map(json.loads, metrics.read_text().splitlines())
    return {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}


if __name__ == "__main__":
    main()
