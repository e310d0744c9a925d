"""The table of runs: each row names a run and overrides settings of the config.

Runs share all stages before training, so only settings of later stages can be columns.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from tokamake.config_files import read_table, validate
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.root import Config

_RUN_SECTIONS = (
    *("seed", "corpora", "weights", "data_root", "model"),
    *("train", "finetune", "convert", "export", "evaluate", "generate"),
)
"""Sections and settings that may differ between runs."""


class NamedRun(NamedTuple):
    """A run with its config."""

    config: "Config"
    where: str
    """Origin of the config, for messages: config file, or table and line."""


def read_runs(
    values: dict[str, Any], source: str, *, context: dict[str, Any] | None = None
) -> dict[str, NamedRun]:
    """Read and check the config of each run.

    Args:
        values: parsed config. Its key `runs` names a table with the column `run`; its other columns
            have dotted names of settings, for example `train.optimizer.name`. Cells are YAML; an
            empty cell keeps the value of the config.

    Returns:
        Name of the run → its config, in the order of the table. Without a table, only the `run` of
        the config.
    """
    from tokamake.config.root import Config

    if not (isinstance(values, dict) and isinstance(values.get("runs"), str)):
        config = validate(Config, values, source, context=context)
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
            overridden = _with_overrides(values, cells, where=where)
            config = validate(Config, overridden, where, context=context)
        except UserError as error:
            raise _attribute_mistakes(
                error, where, values=values, source=source, context=context
            ) from None
        if config.run in runs:
            raise UserError(
                f"{where}: run {config.run!r} is already in line {lines[config.run]}; "
                "give each run its own name"
            )
        runs[config.run], lines[config.run] = NamedRun(config, where), number
    _check_push(runs)
    return runs


def _check_push(runs: dict[str, NamedRun]) -> None:
    """Check that no two runs are uploaded to one place; runs that finetune are not uploaded."""
    first: dict[str, str] = {}
    for name, (run, where) in runs.items():
        push = run.export.push if run.finetune is None else None
        if push and first.setdefault(push, name) != name:
            raise UserError(
                f"{where}: export.push: {push}: run {first[push]} is uploaded there; give each run "
                "a repository or a branch of its own (hf://ORG/NAME@BRANCH)"
            )


def _attribute_mistakes(
    error: UserError,
    where: str,
    *,
    values: dict[str, Any],
    source: str,
    context: dict[str, Any] | None,
) -> UserError:
    """Report `source` as the place of a mistake that does not come from this row."""
    from tokamake.config.root import Config

    try:
        validate(Config, values, source, context=context)
    except UserError as config_error:
        config_lines = set(str(config_error).splitlines())
        lines = [
            moved if (moved := line.replace(where, source, 1)) in config_lines else line
            for line in str(error).splitlines()
        ]
        return UserError("\n".join(lines))
    return error


def _check_columns(columns: list[str], where: str) -> None:
    from tokamake.config.root import Config

    if "run" not in columns:
        raise UserError(f"{where}: no column run; add one with the runs' names")
    for column in columns:
        section = column.partition(".")[0]
        if columns.count(column) > 1:
            raise UserError(f"{where}: {column}: duplicate column; remove one")
        if section in _RUN_SECTIONS or column == "run":
            continue
        if section in Config.model_fields:
            raise UserError(
                f"{where}: {column}: must be the same for all runs, which share their data; set it "
                "in the config, or build the run from another config with its own data_set"
            )
        raise UserError(
            f"{where}: {column}: no such setting; columns are run and settings of "
            f"{', '.join(_RUN_SECTIONS)}, for example train.optimizer.learning_rate, "
            "separated by one tab each"
        )


def _with_overrides(values: dict[str, Any], cells: dict[str, str], *, where: str) -> dict[str, Any]:
    overridden = copy.deepcopy(values)
    for column, text in cells.items():
        *sections, name = column.split(".")
        section = overridden
        for part in sections:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        try:
            section[name] = text if column == "run" else yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(
                f"{where}: {column}: {text!r}: not valid YAML; write the cell as in config.yaml"
            ) from None
    model = overridden.get("model")
    if isinstance(model, dict) and isinstance(model.get("checkpoint"), dict):
        # The config states the architecture of the first run; positions may have changed since.
        model["architecture"] = model["architecture"] if "model.architecture" in cells else None
    return overridden
