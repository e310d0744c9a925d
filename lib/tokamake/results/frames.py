"""Data frames with the same columns and dtypes for any files, and the folders of runs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tokamake.errors import UserError

Row = dict[str, Any]
_TYPES: dict[str, Any] = {"Int64": int, "float64": (int, float), "string": str}


def frame(rows: Iterable[Row], columns: Mapping[str, str]) -> pd.DataFrame:
    """A row for each mapping, and the columns with their dtypes; absent values are missing."""
    rows = list(rows)
    return pd.DataFrame(
        {
            name: pd.Series([row.get(name) for row in rows], dtype=dtype)
            for name, dtype in columns.items()
        }
    )


def pick(values: Any, columns: Mapping[str, str], *, where: str, remedy: str) -> Row:
    """The values of columns in a JSON object. Absent and null values are left out.

    UserError: `values` is no object, or a value has another type than its column.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where}: not a JSON object; {remedy}")
    row = {name: values[name] for name in columns if values.get(name) is not None}
    for name, value in row.items():
        if not isinstance(value, _TYPES[columns[name]]) or isinstance(value, bool):
            kind = "a text" if columns[name] == "string" else "a number"
            raise UserError(f"{where}: {name} is {value!r}, not {kind}; {remedy}")
    return row


def run_folders(folders: Iterable[str | Path]) -> list[Path]:
    """Folders that have a run.yaml: the given folders, or folders in them, sorted by name."""
    found: dict[Path, None] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; name a results folder or a run's folder")
        inside = sorted(path.parent for path in folder.glob("*/run.yaml"))
        found |= dict.fromkeys([folder] if (folder / "run.yaml").is_file() else inside)
    return [*found]


def concat(frames: Iterable[pd.DataFrame], columns: Mapping[str, str]) -> pd.DataFrame:
    """Frames below each other, numbered from 0; without any, a frame of no rows."""
    whole = pd.concat([frame([], columns), *frames], ignore_index=True)
    return whole.astype(dict(columns))
