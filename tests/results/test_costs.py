"""Costs of jobs from benchmark files as Snakemake writes them."""

import json
from pathlib import Path

import pandas as pd

from tokamake.results import costs

HEADER = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time\n"


def write(path: Path, *attempts: tuple[float, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (f"{s}\t0:00:01\t{rss}\t1\t1\t1\t1\t1\t1\t1\n" for s, rss in attempts)
    path.write_text(HEADER + "".join(rows))


def test_jobs_have_stages_runs_and_node_hours(tmp_path: Path) -> None:
    (tmp_path / "big/training").mkdir(parents=True)
    (tmp_path / "big/run.yaml").touch()
    ranks = [{"rank": rank, "host": f"n{rank // 2}"} for rank in range(4)]
    (tmp_path / "big/training/ranks.json").write_text(json.dumps({"ranks": ranks}))
    folder = tmp_path / "benchmarks"
    write(folder / "big/train.40.tsv", (1800, "12.5"))
    write(folder / "big/evaluate.tsv", (3600, "NA"))
    write(folder / "tokenize/web-00000.tsv", (36, "1"))
    write(folder / "data/gpt2/describe.tsv", (1, "1"), (2, "2"))
    (folder / "report.tsv").write_text("")  # of a job that runs
    found = costs(tmp_path).fillna({"run": "", "data_set": ""})
    key = ["data_set", "run", "stage", "job", "seconds", "nodes", "node_hours"]
    assert found[key].to_numpy().tolist() == [
        ["", "big", "evaluate", "big/evaluate.tsv", 3600, 1, 1],
        ["", "big", "train", "big/train.40.tsv", 1800, 2, 1],
        ["gpt2", "", "describe", "data/gpt2/describe.tsv", 1, 1, 1 / 3600],
        ["gpt2", "", "describe", "data/gpt2/describe.tsv", 2, 1, 2 / 3600],
        ["", "", "tokenize", "tokenize/web-00000.tsv", 36, 1, 0.01],
    ]
    assert pd.isna(found["max_rss_mb"][0])
    assert found["max_rss_mb"][1] == 12.5
