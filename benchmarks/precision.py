"""Compare the validation losses of the default run in bf16 and fp16 with those in fp32.

    python benchmarks/precision.py

Runs the workflow's target `train` in this folder with config/config.yaml and each
`train.precision`, as runs precision-fp32, precision-bf16 and precision-fp16. Finished runs are not
repeated.
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
    for name, losses_by_step in losses.items():
        print(f"| {name} | {' | '.join(f'{losses_by_step[step]:.4f}' for step in steps)} |")
    for name in FORMATS[1:]:
        difference = max(abs(losses[name][step] / losses["fp32"][step] - 1) for step in steps)
        print(f"{name}: differs from fp32 by at most {difference:.2%}")


def trained(precision: str) -> dict[int, float]:
    """Train the default run in a precision and return its validation losses by step."""
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
