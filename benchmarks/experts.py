"""Compare a tiny mixture of experts with a dense model that uses as many weights for a token.

    python benchmarks/experts.py --work /scratch
    python benchmarks/experts.py --upcycle --work /scratch

One workflow trains all runs on text of the Python standard library: for each seed a dense Llama and
a Mixtral of the same active size; with --upcycle also one that starts from the dense run. Runs
of a seed have the same samples in the same order. Each run has one core. --rates tries several
peak learning rates for both models.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from tokamake import results

_ROOT = Path(__file__).parents[1]
_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}
"""So narrow, with a small vocabulary, that MLPs have most of the weights and are too small for the
text."""
_INNER, _EXPERTS, _CHOSEN = 192, 16, 2
DENSE = {"family": "llama", "intermediate_size": _INNER, **_SHAPE}
EXPERTS = {
    "family": "mixtral",
    "intermediate_size": _INNER // _CHOSEN,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": _CHOSEN,
    **_SHAPE,
}


def main() -> None:
    """Train all runs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rates", nargs="+", default=["4e-3"], help="peak learning rates")
    parser.add_argument("--upcycle", action="store_true", help="train upcycled models, too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    folder: Path = options.work / "experts"
    folder.mkdir(parents=True)
    kinds = ("dense", "experts", *(("upcycled",) if options.upcycle else ()))
    write_config(folder, options.seeds, steps=options.steps, kinds=kinds, rates=options.rates)
    start = time.monotonic()
    command = [sys.executable, "-m", "snakemake", "--profile", "profiles/local"]
    command += ["--set-resources", "train:tasks=1", "--set-threads", "train=1"]
    command += ["--quiet", "all", "--configfile", "experts.config.yaml", "--", "train"]
    subprocess.run(command, check=True, cwd=folder)
    minutes = (time.monotonic() - start) / 60
    runs = results.runs(folder / "results")
    print("| model | validation loss, mean of the seeds | spread (standard deviation) |")
    print("| --- | ---: | ---: |")
    for kind in kinds:
        for rate in options.rates:
            names = [f"{kind}-{rate}-{seed}" for seed in options.seeds]
            values = [*runs.loc[runs.run.isin(names), "validation_loss"]]
            spread = stdev(values) if len(values) > 1 else 0.0
            print(f"| {kind}, {rate} | {mean(values):.3f} | {spread:.3f} |")
    print(f"{minutes:.1f} minutes")


def write_config(
    folder: Path, seeds: list[int], *, steps: int, kinds: Sequence[str], rates: Sequence[str]
) -> None:
    """Write the config and its table of runs."""
    for name in ("workflow", "profiles", "config"):
        (folder / name).symlink_to(_ROOT / name)
    config = {
        "runs": "runs.tsv",
        "sample_corpus": {name: {"num_files": 1, "file_bytes": 10**7} for name in ("code", "docs")},
        "tokenizer": {"vocab_size": 512},
        "train": {
            "sequence_length": _SHAPE["max_position_embeddings"],
            "micro_batch_size": 32,
            "global_batch_size": 32,
            "train_steps": steps,
            "save_interval": steps,
            "evaluation_interval": steps // 4,
            "evaluation_steps": 16,
        },
    }
    (folder / "experts.config.yaml").write_text(yaml.safe_dump(config))
    for name, shape in (("dense", DENSE), ("experts", EXPERTS)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(shape))
    columns = ["run", "seed", "model.architecture", "train.optimizer.learning_rate"]
    columns += ["model.checkpoint.run", "train.finetune"]
    rows: list[Sequence[Any]] = [columns]
    for seed, rate in product(seeds, rates):
        starts = {
            "dense": ("dense.yaml", rate, "", ""),
            "experts": ("experts.yaml", rate, "", ""),
            "upcycled": ("experts.yaml", rate, f"dense-{rate}-{seed}", "true"),
        }
        rows += [(f"{kind}-{rate}-{seed}", seed, *starts[kind]) for kind in kinds]
    (folder / "runs.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
