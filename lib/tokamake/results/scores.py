"""Scores of evaluations: evaluate.json, tasks/*.json and evaluate_finetuned.json of a run."""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from tokamake.errors import UserError
from tokamake.files import read_json
from tokamake.results.finished_runs import read_train_json
from tokamake.results.frames import Row, frame, run_folders

HELD_OUT = "held-out"
"""Task of `evaluate` in the column `task`: the documents that no run is trained on."""
_COLUMNS = {
    **{"run": "string", "step": "Int64", "task": "string", "subset": "string"},
    **{"metric": "string", "value": "float64"},
}


def evaluations(*folders: str | Path) -> pd.DataFrame:
    """Scores of runs: a row for each run, step, task, subset and metric.

    | column | dtype | meaning |
    |---|---|---|
    | run | string | name of the run's folder |
    | step | Int64 | step of the checkpoint; missing: the run's last one, which has no train.json |
    | task | string | held-out (`evaluate`), or the name of a task |
    | subset | string | corpus or test set; overall: all of it |
    | metric | string | such as loss (nats per token), bits_per_byte, accuracy (0 to 1), documents |
    | value | float64 | NaN: no document to score |

    Args:
        folders: results folders, or folders of single runs. Runs without scores are left out.

    Raises:
        UserError: a folder does not exist, or a file of scores is damaged.
    """
    rows = [
        {"run": folder.name, **row} for folder in run_folders(folders) for row in _scores(folder)
    ]
    return frame(rows, _COLUMNS)


def _scores(folder: Path) -> Iterator[Row]:
    last = read_train_json(folder).get("step")
    for _, step, path in _by_step(folder.glob("evaluate.*json"), last):
        scores = read_scores(path)
        subsets = {**scores["corpora"], "overall": scores["overall"]}
        yield from _rows(subsets, path, step=step, task=HELD_OUT)
    for name, step, path in _by_step((folder / "tasks").glob("*.json"), last):
        yield from _rows({"overall": read_task(path)}, path, step=step, task=name)
    path = folder / "evaluate_finetuned.json"
    if path.is_file():
        finetuned = _object(path, "evaluate-finetuned", keys=("scores",))
        yield from _rows(finetuned["scores"], path, step=None, task=finetuned.get("task"))


def _by_step(paths: Iterable[Path], last: int | None) -> list[tuple[str, int | None, Path]]:
    """Name and step of files NAME.STEP.json and NAME.json, whose step is `last`; it comes last."""
    found = []
    for path in paths:
        if match := re.fullmatch(r"([^.]+)(?:\.(\d+))?\.json", path.name):
            found.append((match[1], int(match[2]) if match[2] else math.inf, path))
    return [
        (name, last if step == math.inf else int(step), path) for name, step, path in sorted(found)
    ]


def _rows(subsets: dict[str, Any], path: Path, *, step: int | None, task: Any) -> Iterator[Row]:
    key = {"step": step, "task": str(task)}
    for subset, scores in subsets.items():
        if not isinstance(scores, dict):
            raise UserError(f"{path}: {subset}: no scores; write the file again")
        for metric, value in scores.items():
            if not isinstance(value, int | float | None):
                raise UserError(f"{path}: {metric} is {value!r}, not a number; write it again")
            yield {**key, "subset": subset, "metric": metric, "value": value}


def read_scores(path: Path) -> dict[str, Any]:
    """Scores of `evaluate`: `overall`, `corpora`, and `split` if it is not the test split."""
    return _object(path, "evaluate", keys=("corpora", "overall"))


def read_task(path: Path) -> dict[str, Any]:
    """Scores of a task, by metric."""
    scores: dict[str, Any] = _object(path, "evaluate-task", keys=("scores",))["scores"]
    return scores


def _object(path: Path, command: str, *, keys: tuple[str, ...]) -> dict[str, Any]:
    """A JSON object; the values of `keys` are objects, too."""
    remedy = f"make it with `tokamake {command}`"
    value = read_json(path, remedy)
    if not isinstance(value, dict) or any(not isinstance(value.get(key), dict) for key in keys):
        raise UserError(f"{path}: not scores of `{command}`; {remedy}")
    return value
