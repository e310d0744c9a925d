"""Texts that runs have written while they train, as a data frame: `train.sample_interval`."""

from pathlib import Path

import pandas as pd

from tokamake.results.frames import Row, frame, pick, run_folders
from tokamake.train import metrics

_FILE = "training/samples.jsonl"
_TEXTS = {"corpus": "string", "prompt": "string", "text": "string"}
_COLUMNS = {"run": "string", "step": "int64", **_TEXTS}


def samples(*folders: str | Path) -> pd.DataFrame:
    """Texts of runs during training: a row for each run, step and prompt.

    | column | dtype | meaning |
    |---|---|---|
    | run | string | name of the run's folder |
    | step | int64 | steps that were trained |
    | corpus | string | corpus of the prompt; empty if the config states the prompt |
    | prompt, text | string | the prompt, and its continuation |

    Args:
        folders: results folders, or folders of single runs. Runs without samples are left out, and
            so are damaged lines.

    Raises:
        UserError: a folder does not exist, or a value is no text.
    """
    rows = [row for folder in run_folders(folders) for row in _of_run(folder)]
    return frame(rows, _COLUMNS)


def _of_run(folder: Path) -> list[Row]:
    path = folder / _FILE
    return [
        {
            **{"run": folder.name, "step": record["step"]},
            **pick(record, _TEXTS, where=str(path), remedy="remove the line"),
        }
        for record in metrics.read(path)
    ]
