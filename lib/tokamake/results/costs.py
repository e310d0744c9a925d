"""Time and memory of jobs, from Snakemake's benchmarks, and from the records of trainings."""

import csv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pandas as pd

from tokamake.errors import UserError
from tokamake.files import read_json
from tokamake.results.frames import Row, frame
from tokamake.results.starts import stopped_seconds

_COLUMNS = {
    **{"data_set": "string", "run": "string", "stage": "string", "job": "string"},
    **{"seconds": "float64", "nodes": "Int64", "node_hours": "float64", "max_rss_mb": "float64"},
}
_RANKED = ("train", "finetune")


def costs(*folders: str | Path) -> pd.DataFrame:
    """Jobs of results folders: finished ones, and trainings that were stopped or still run.

    Snakemake's benchmark of a job has a line for the last, successful attempt; a rule may ask for
    repeats. A training that did not reach its end has none: its time is from the first to the last
    record that it wrote for TensorBoard.

    | column | dtype | meaning |
    |---|---|---|
    | data_set | string | data folder; missing: the default one, or the job of a run |
    | run | string | missing: the job belongs to no run |
    | stage, job | string | rule, and its benchmark; RUN/unfinished: a training without one |
    | seconds | float64 | wall time |
    | nodes | Int64 | hosts of the last training of the run; 1 for other stages |
    | node_hours | float64 | seconds × nodes / 3600 |
    | max_rss_mb | float64 | largest memory on the node of the launcher; NaN: too short to measure |

    Args:
        folders: results folders.

    Raises:
        UserError: a folder does not exist.
    """
    rows: list[Row] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; name a results folder")
        root, nodes = folder / "benchmarks", dict[str, int]()
        for path in sorted(root.rglob("*.tsv")):
            rows += _rows(path, root, nodes=nodes)
        for run in sorted(path.parent for path in folder.glob("*/run.yaml")):
            rows += _unfinished(run)
    return frame(rows, _COLUMNS)


def _rows(path: Path, root: Path, *, nodes: dict[str, int]) -> Iterator[Row]:
    job = path.relative_to(root)
    parts, row = list(job.with_suffix("").parts), Row()
    if parts[0] == "data" and len(parts) > 2:
        row["data_set"], parts = parts[1], parts[2:]
    elif len(parts) > 1 and (root.parent / parts[0] / "run.yaml").is_file():
        row["run"], parts = parts[0], parts[1:]
    row |= {"stage": parts[0].partition(".")[0], "job": str(job), "nodes": 1}
    if row["stage"] in _RANKED and (run := row.get("run")):
        if run not in nodes:
            nodes[run] = num_hosts(root.parent / run)
        row["nodes"] = nodes[run]
    with path.open(encoding="utf-8") as stream:
        for values in csv.DictReader(stream, delimiter="\t"):
            with suppress(KeyError, TypeError, ValueError):  # of a job that is writing
                seconds, memory = float(values["s"]), values["max_rss"]
                hours = seconds * row["nodes"] / 3600
                known = {"max_rss_mb": float(memory)} if memory not in ("NA", "-", "") else {}
                yield row | {"seconds": seconds, "node_hours": hours} | known


def _unfinished(run: Path) -> Iterator[Row]:
    """A row for each training of a run that did not reach its end."""
    nodes = num_hosts(run)
    stage = "finetune" if (run / "start").is_dir() else "train"
    for seconds in stopped_seconds(run):
        place = {"run": run.name, "stage": stage, "job": f"{run.name}/unfinished"}
        hours = seconds * nodes / 3600
        yield {**place, "seconds": seconds, "nodes": nodes, "node_hours": hours}


def num_hosts(run: Path) -> int:
    """Hosts of the last training in a run's folder; 1 if they are not known."""
    with suppress(UserError, KeyError, TypeError):
        ranks = read_json(run / "training/ranks.json", "")["ranks"]
        return max(1, len({rank["host"] for rank in ranks}))
    return 1
