"""Metrics of a run (metrics.jsonl) as a data frame over steps."""

from pathlib import Path
from typing import Any

import pandas as pd

from tokamake.errors import UserError
from tokamake.results.frames import concat, run_folders
from tokamake.train import metrics as records

_KEYS = {"run": "string", "step": "int64"}


def metrics(*folders: str | Path) -> pd.DataFrame:
    """Metrics of runs: a row for each run and step at which something was measured.

    The other columns are the keys of metrics.jsonl, all float64; NaN: not measured at this step.

    | column | dtype | meaning |
    |---|---|---|
    | run | string | name of the run's folder |
    | step | int64 | optimizer steps |
    | loss | float64 | training loss, nats per token |
    | loss/CORPUS | float64 | the same for a corpus, with `train.log_corpus_losses` |
    | learning_rate, grad_norm | float64 | of the step |
    | tokens_per_second | float64 | of all ranks |
    | model_flops_per_second | float64 | of the model, all ranks, without recomputation |
    | mfu | float64 | the same as a share of the devices' peak, if it is known |
    | peak_memory_bytes | float64 | most memory of rank 0 so far: of its device, or of the process |
    | consumed_tokens | float64 | training tokens up to the step |
    | validation_loss, validation_loss/SPLIT | float64 | nats per token |

    Args:
        folders: results folders, or folders of single runs. Runs without metrics.jsonl are left
            out, and so is the incomplete last line of a run that trains.

    Raises:
        UserError: a folder does not exist, or a line is damaged.
    """
    frames = []
    for folder in run_folders(folders):
        path = folder / "training" / records.FILE
        if path.is_file():
            is_finished = (folder / "train.json").is_file()
            frames.append(read_metrics(path, may_grow=not is_finished))
            frames[-1].insert(0, "run", pd.Series(folder.name, frames[-1].index, dtype="string"))
    return concat(frames, _KEYS)


def read_metrics(path: Path, *, may_grow: bool = False) -> pd.DataFrame:
    """Columns `step` (int64) and the keys of all lines (float64), by step.

    If a key occurs twice at a step, because of a restart, the last line counts. `may_grow`: an
    incomplete last line is left out.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make it with `tokamake train`") from None
    if may_grow:
        content = content[: content.rfind(b"\n") + 1]
    steps: dict[int, dict[str, float]] = {}
    for number, line in enumerate(content.splitlines(), 1):
        record = _values(line, where=f"{path}:{number}")
        steps.setdefault(int(record.pop("step")), {}).update(record)
    keys = dict.fromkeys(key for record in steps.values() for key in record)
    columns = {key: [steps[step].get(key) for step in sorted(steps)] for key in keys}
    data = {key: pd.Series(values, dtype="float64") for key, values in columns.items()}
    return pd.DataFrame({"step": pd.Series(sorted(steps), dtype="int64"), **data})


def _values(line: bytes, *, where: str) -> dict[str, Any]:
    """The numbers of a line; null is a value that was not measured."""
    records_of_line, _ = records.parse(line + b"\n")
    if not records_of_line:
        raise UserError(f"{where}: not a JSON object with a step; remove the line")
    for key, value in records_of_line[0].items():
        if not isinstance(value, int | float):
            raise UserError(f"{where}: {key} is {value!r}, not a number; remove the line")
    return records_of_line[0]
