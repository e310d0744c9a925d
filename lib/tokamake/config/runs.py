"""The table of runs: each row is the config with some settings replaced, and a name.

Runs share whatever comes before training, so only settings of a run can be columns.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from tokamake.errors import UserError
from tokamake.validation import read_table, validate

if TYPE_CHECKING:
    from tokamake.config.root import Config

_OF_A_RUN = ("seed", "corpora", "model", "train", "convert", "evaluate", "generate")
"""Sections and settings in which runs may differ."""


class NamedRun(NamedTuple):
    """The config of a run."""

    config: "Config"
    """All its settings."""
    where: str
    """Where they stand, for messages: config file, or table and line."""


def read_runs(values: dict[str, Any], source: str) -> dict[str, NamedRun]:
    """Check the config of each run.

    Args:
        values: the config as it was read; its key `runs`, if filled, names a table with the column
            `run` and others that are called as settings are, with dots: `train.optimizer.name`.
            Cells are YAML; an empty one leaves what the config says.
        source: files that the config was read from, for messages.

    Returns:
        Configs by the names of their runs, in the table's order; of the config's own `run` alone
        where there is no table.

    Raises:
        UserError: the config or the table is wrong.
    """
    from tokamake.config.root import Config

    if not (isinstance(values, dict) and isinstance(values.get("runs"), str)):
        config = validate(Config, values, source)
        return {config.run: NamedRun(config, source)}
    path = Path(values["runs"])
    table = read_table(path, setting="runs", row="run")
    _check_columns(table.columns, f"{path}:{table.header}")
    runs: dict[str, NamedRun] = {}
    lines: dict[str, int] = {}
    for number, cells in table.rows.items():
        where = f"{path}:{number}"
        if "run" not in cells:
            raise UserError(f"{where}: run: missing; give the run a name")
        try:
            config = validate(Config, _replaced(values, cells, where), where)
        except UserError as error:
            raise _where_they_stand(error, where, values, source) from None
        if config.run in runs:
            raise UserError(
                f"{where}: run {config.run!r} stands in line {lines[config.run]}, too; "
                "give each its own name"
            )
        runs[config.run], lines[config.run] = NamedRun(config, where), number
    return runs


def _where_they_stand(
    error: UserError, where: str, values: dict[str, Any], source: str
) -> UserError:
    """Faults of a row; those that the config has without it are told as the config's."""
    from tokamake.config.root import Config

    try:
        validate(Config, values, source)
    except UserError as own:
        of_config = set(str(own).splitlines())
        told = [
            alone if (alone := line.replace(where, source, 1)) in of_config else line
            for line in str(error).splitlines()
        ]
        return UserError("\n".join(told))
    return error


def _check_columns(columns: list[str], where: str) -> None:
    from tokamake.config.root import Config

    if "run" not in columns:
        told = ", separated by one tab each" if len(columns) == 1 else ""
        raise UserError(f"{where}: no column run; add one with the runs' names{told}")
    for column in columns:
        section = column.partition(".")[0]
        if columns.count(column) > 1:
            raise UserError(f"{where}: {column}: stands there twice; leave one of the columns")
        if section in _OF_A_RUN or column == "run":
            continue
        if section in Config.model_fields:
            raise UserError(
                f"{where}: {column}: the same for all runs, which share their data; set it in the "
                "config, or build the run in a folder of its own"
            )
        raise UserError(
            f"{where}: {column}: no such setting; columns are run and settings of "
            f"{', '.join(_OF_A_RUN)}, as train.optimizer.learning_rate, separated by one tab each"
        )


def _replaced(values: dict[str, Any], cells: dict[str, str], where: str) -> dict[str, Any]:
    """The config with the settings of a row."""
    changed = copy.deepcopy(values)
    for column, text in cells.items():
        *sections, name = column.split(".")
        section = changed
        for part in sections:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        try:
            section[name] = text if column == "run" else yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(
                f"{where}: {column}: {text!r}: not valid YAML; write it as in config.yaml"
            ) from None
    return changed
