"""Settings and results of runs: run.yaml, train.json and evaluate.json."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from tokamake.checkpoint import model_tensors
from tokamake.config.architecture import Architecture
from tokamake.config.data_set import data_set_in
from tokamake.config.fields import dotted
from tokamake.config_files import read_yaml, validate
from tokamake.errors import UserError
from tokamake.files import read_json
from tokamake.results.frames import Row, frame, pick, run_folders

_SETTINGS = {"data_set": "string", "family": "string", "parameters": "Int64", "seed": "Int64"}
_TRAINED = {
    **{"step": "Int64", "consumed_tokens": "Int64", "first_loss": "float64"},
    **{"last_loss": "float64", "seconds": "float64", "tokens_per_second": "float64"},
    **{"world_size": "Int64", "checkpoint": "string"},
}
"""Keys of train.json."""
_VALIDATED = {"validation_loss": "float64"}
_SCORES = {"perplexity": "float64", "bits_per_byte": "float64"}
_COLUMNS = {
    **{"run": "string", "folder": "string"},
    **_SETTINGS,
    **_TRAINED,
    **_VALIDATED,
    **_SCORES,
}


def runs(*folders: str | Path) -> pd.DataFrame:
    """Runs and their results, a row for each run, by name.

    | column | dtype | meaning |
    |---|---|---|
    | run | string | name of the run's folder |
    | folder | string | path of this folder |
    | data_set | string | setting of the config, or a data folder outside results/data |
    | family | string | model family |
    | parameters | Int64 | parameters of the model |
    | seed | Int64 | seed of all random numbers |
    | step | Int64 | optimizer steps; this and all below are missing before the run has finished |
    | consumed_tokens | Int64 | training tokens; repeated ones count each time |
    | first_loss, last_loss | float64 | at the first and last logged step, nats per token |
    | seconds | float64 | time of training |
    | tokens_per_second | float64 | mean speed of all ranks |
    | world_size | Int64 | ranks |
    | checkpoint | string | path of the last checkpoint |
    | validation_loss | float64 | last loss of the validation split, nats per token |
    | perplexity, bits_per_byte | float64 | of the held-out documents of all corpora (`evaluate`) |

    Args:
        folders: results folders, or folders of single runs.

    Raises:
        UserError: a folder does not exist, or a file is damaged.
    """
    return frame(map(_row, run_folders(folders)), _COLUMNS)


def settings(*folders: str | Path) -> pd.DataFrame:
    """Settings of runs (run.yaml), a row for each run, by name.

    The columns are `run` (string) and the names of settings, such as train.optimizer.learning_rate,
    each with the dtype that pandas infers; missing: the run does not state the setting.

    Args:
        folders: results folders, or folders of single runs.

    Raises:
        UserError: a folder does not exist, or a run.yaml is damaged.
    """
    found = run_folders(folders)
    rows = [dotted(_run_yaml(folder)) | {"run": folder.name} for folder in found]
    names = dict.fromkeys(["run", *(name for row in rows for name in row)])
    return pd.DataFrame(rows, columns=[*names]).astype({"run": "string"})


def read_train_json(folder: Path) -> Row:
    """Known values of train.json in a run's folder; empty if there is no such file."""
    path = folder / "train.json"
    if not path.is_file():
        return {}
    remedy = "make it with `tokamake train`"
    value = read_json(path, remedy)
    row = pick(value, _TRAINED, where=str(path), remedy=remedy)
    if losses := value.get("validation_losses"):
        row |= pick(losses[-1], _VALIDATED, where=f"{path}: validation_losses", remedy=remedy)
    return row


def _run_yaml(folder: Path) -> dict[str, Any]:
    remedy = "make it with `tokamake resolve`"
    value = read_yaml(folder / "run.yaml", remedy)
    if not isinstance(value, dict):
        raise UserError(f"{folder / 'run.yaml'}: not a resolved run; {remedy}")
    return value


def _row(folder: Path) -> Row:
    stated = {"data_root": "string", "seed": "Int64"}
    run = _run_yaml(folder)
    row = pick(run, stated, where=f"{folder / 'run.yaml'}", remedy="run `tokamake resolve` again")
    if data_root := row.pop("data_root", None):
        data_set = data_set_in(data_root)
        row["data_set"] = data_set.name if data_set else data_root
    with suppress(UserError):  # a family or a setting of a later version
        architecture = validate(Architecture, run.get("architecture"), str(folder))
        shapes = model_tensors.shapes(architecture).values()
        row |= {"family": architecture.family, "parameters": sum(map(math.prod, shapes))}
    row |= {"run": folder.name, "folder": str(folder), **read_train_json(folder)}
    scores = folder / "evaluate.json"
    if scores.is_file():
        remedy = "make it with `tokamake evaluate`"
        overall = read_json(scores, remedy)
        overall = overall.get("overall") if isinstance(overall, dict) else overall
        row |= pick(overall, _SCORES, where=str(scores), remedy=remedy)
    return row
