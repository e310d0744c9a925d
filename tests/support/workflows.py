"""A user's folder, Snakemake in it, and what it says that it would do."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support import snakemake_server
from tests.support.paths import ROOT

ARCHITECTURE = {
    "family": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

CONFIG = {
    "run": "smoke",
    "corpora": "corpora.tsv",
    "sample_corpus": {
        "code": {"num_files": 2, "file_bytes": 80_000},
        "docs": {"num_files": 2, "file_bytes": 60_000},
    },
    "tokenizer": {"vocab_size": 500},
    "plan": {"shard_bytes": 50_000, "merged_bytes": 45_000},
    "model": {"architecture": "architecture.yaml"},
    "train": {
        "sequence_length": 32, "micro_batch_size": 4, "global_batch_size": 16, "train_steps": 40,
        "split": "80,10,10", "log_interval": 1, "evaluation_interval": 20, "evaluation_steps": 1,
        "optimizer": {"learning_rate": 0.02}, "schedule": {"warmup_steps": 2},
    },
    "evaluate": {"max_tokens": 2000},
    "generate": {"prompts": ["The ", "it's $HOME {x}"], "max_new_tokens": 8},
}  # fmt: skip

CORPORA = """\
corpus\tfiles\ttext_key\tweight
code\tresults/raw/code/*\ttext\t2
docs\tresults/raw/docs/*\ttext\t1
"""

SNAKEMAKE = (sys.executable, "-m", "snakemake", "--profile", "profiles/local")


def make_workspace(folder: Path) -> Path:
    """A user's folder: the workflow and profiles as they are, a config of one's own."""
    for name in ("workflow", "profiles", "config"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "architecture.yaml").write_text(yaml.safe_dump(ARCHITECTURE))
    (folder / "corpora.tsv").write_text(CORPORA)
    return folder


def copy_without_run(built: Path, folder: Path) -> Path:
    """A copy of a finished workspace that has the data, but no run yet."""
    copy = Path(shutil.copytree(built, folder / "copy", symlinks=True))
    shutil.rmtree(copy / "results/smoke")
    (copy / "results/report.html").unlink()
    return copy


def snakemake(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "SNAKEMAKE_PROFILE"}
    return snakemake_server.start(["--profile", "profiles/local", *arguments], folder, environment)


def snakemake_alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Snakemake that trains on one rank: each rank takes seconds to start."""
    return snakemake(folder, "--set-resources", "train:tasks=1", *arguments)


def jobs(result: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Jobs by rule, from the table of a dry run."""
    assert result.returncode == 0, result.stdout + result.stderr
    text = result.stdout + result.stderr
    table = re.search(r"^job +count\n-+ +-+\n(.*?)^total", text, re.M | re.S)
    rows = [] if table is None else re.findall(r"^(\w+) +(\d+)$", table[1], re.M)
    return {rule: int(count) for rule, count in rows}


MINE = ("--configfile", "my.yaml", "--")
