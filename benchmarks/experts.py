"""Compare a tiny mixture of experts with a dense model that uses as many weights for a token.

    python benchmarks/experts.py --work /scratch
    python benchmarks/experts.py --upcycle --work /scratch

One workflow trains all runs on text of the Python standard library: for each seed a dense Llama and
a Mixtral of the same active size; with --upcycle also one that starts from the dense run. Runs
of a seed have the same samples in the same order.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from tokamake import results

_ROOT = Path(__file__).parents[1]
_SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
_INNER, _EXPERTS, _CHOSEN = 352, 8, 2
DENSE = {"family": "llama", "intermediate_size": _INNER, **_SHAPE}
EXPERTS = {
    "family": "mixtral",
    "intermediate_size": _INNER // _CHOSEN,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": _CHOSEN,
    "rope_theta": 10000.0,
    **_SHAPE,
}


def main() -> None:
    """Train all runs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--upcycle", action="store_true", help="train upcycled models, too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    folder: Path = options.work / "experts"
    folder.mkdir(parents=True)
    kinds = ("dense", "experts", *(("upcycled",) if options.upcycle else ()))
    write_config(folder, options.seeds, steps=options.steps, kinds=kinds)
    start = time.monotonic()
    command = [sys.executable, "-m", "snakemake", "--profile", "profiles/local"]
    command += ["--quiet", "all", "--configfile", "experts.config.yaml", "--", "train"]
    subprocess.run(command, check=True, cwd=folder)
    minutes = (time.monotonic() - start) / 60
    runs = results.runs(folder / "results")
    losses = {kind: [*runs.loc[runs.run.str.startswith(kind), "validation_loss"]] for kind in kinds}
    print("| model | validation loss, mean of the seeds | spread (standard deviation) |")
    print("| --- | ---: | ---: |")
    for kind, values in losses.items():
        spread = stdev(values) if len(values) > 1 else 0.0
        print(f"| {kind} | {mean(values):.3f} | {spread:.3f} |")
    print(f"{minutes:.1f} minutes")


def write_config(folder: Path, seeds: list[int], *, steps: int, kinds: Sequence[str]) -> None:
    """Write the config and its table of runs."""
    for name in ("workflow", "profiles", "config"):
        (folder / name).symlink_to(_ROOT / name)
    config = {
        "runs": "runs.tsv",
        "sample_corpus": {name: {"num_files": 1, "file_bytes": 10**7} for name in ("code", "docs")},
        "tokenizer": {"vocab_size": 4096},
        "train": {
            "sequence_length": _SHAPE["max_position_embeddings"],
            "micro_batch_size": 16,
            "global_batch_size": 32,
            "train_steps": steps,
            "optimizer": {"learning_rate": 2e-3},
            "save_interval": steps,
            "evaluation_interval": 100,
            "evaluation_steps": 16,
        },
    }
    (folder / "experts.config.yaml").write_text(yaml.safe_dump(config))
    for name, shape in (("dense", DENSE), ("experts", EXPERTS)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(shape))
    columns = ("run", "seed", "model.architecture", "model.checkpoint.run", "train.finetune")
    rows: list[tuple[Any, ...]] = [columns]
    for seed in seeds:
        starts = {
            "dense": ("dense.yaml", "", ""),
            "experts": ("experts.yaml", "", ""),
            "upcycled": ("experts.yaml", f"dense-{seed}", "true"),
        }
        rows += [(f"{kind}-{seed}", seed, *starts[kind]) for kind in kinds]
    (folder / "runs.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
