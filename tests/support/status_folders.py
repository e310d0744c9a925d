"""Folders of a workflow as `status` finds them: logs, products, marks of running jobs."""

import json
import os
from base64 import urlsafe_b64encode
from pathlib import Path

import yaml

from tests.support.finished_run import RUN, metric
from tokamake.config.data_set import DataSet
from tokamake.data.indexed.manifest import write_manifest
from tokamake.runtime.folder_lock import this_process
from tokamake.status.jobs import DagJob, write_jobs

NOW = 1_700_000_000.0  # the time of all calls


def job(rule: str, name: str = "", *, run: str = "", output: str = "", inputs: str = "") -> DagJob:
    """A job with one output and the log of its rule."""
    log = "/".join(filter(None, ["logs", run, rule, name]))
    product = output or f"results/{run or 'data/batches'}/{rule}{name and '/'}{name}.json"
    return DagJob(rule, run, [product], inputs.split(), f"{log}.log")


def write(path: Path, text: str, *, age: float = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (NOW - age,) * 2)


def mark(folder: Path, product: str) -> None:
    """Mark a job as running, as Snakemake does; long names become folders."""
    name = urlsafe_b64encode(product.encode()).decode()
    path = folder / ".snakemake/incomplete" / f"@{name[:20]}" / name[20:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def lock(folder: Path, *, age: float) -> None:
    """Lock the folder, as Snakemake does at its start."""
    for name in ("0.input.lock", "0.output.lock"):
        write(folder / ".snakemake/locks" / name, "", age=age)


def train(folder: Path, *, age: float) -> None:
    run_jobs = [
        job("weigh", run="big", output="results/data/big.weights.txt"),
        job("index", run="big", output="results/big/index/index.json"),
        job("resolve", run="big", output="results/big/run.yaml"),
        job("train", run="big"),
        job("export_hf", run="big", output="results/big/export"),
        *(job(rule, run="big") for rule in ("evaluate", "generate", "plot")),
    ]
    write_jobs(run_jobs, DataSet(), rules=())
    for stage in ("weigh", "index", "resolve", "train"):
        write(folder / f"logs/big/{stage}.log", "words\n", age=age)
    write(folder / "results/data/big.weights.txt", "1 a a\n")
    write(folder / "results/big/index/index.json", "{}")
    write(folder / "results/big/run.yaml", yaml.safe_dump({**RUN, "run": "big"}))
    mark(folder, "results/big/train.json")
    lock(folder, age=9000)
    lines = [{"step": 0, "validation_loss": 7.0}]
    lines += [{**metric(step, 4.0), "step_seconds": 90.0} for step in (5, 10)]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 11, "lo'
    write(folder / "results/big/training/metrics.jsonl", text, age=age)


def index_run(folder: Path, run: str, *, sha256: str) -> None:
    """Write the sample index of a run of one dataset, an hour ago."""
    pairs = {"merged/web-0000_text_document": {"sha256": {"bin": sha256}}}
    write(folder / f"results/{run}/index/index.json", json.dumps({"pairs": pairs}), age=3600)


def write_dataset(folder: Path, *, sha256: str, age: float) -> None:
    path = folder / "results/data/merged/web-0000_text_document.json"
    path.parent.mkdir(exist_ok=True)
    write_manifest(path, {"sha256": {"bin": sha256}})
    os.utime(path, (NOW - age,) * 2)


def killed(folder: Path) -> None:
    """Let the jobs, and the training of big, be written by a process that has ended."""
    for path in folder.glob("results/*/jobs.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "writer": DEAD}))
    write(folder / "results/big/.training.owner", DEAD)


DEAD = this_process().replace(f"{os.getpid()} ", "999999999 ", 1)
