"""The command of Snakemake that `tokamake run` starts, and the checks of what a user types."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tokamake.config.overrides import add_override
from tokamake.config_files import read_yaml
from tokamake.doctor.find_profile import SNAKEFILES, find_profile, find_repository, names_in
from tokamake.errors import UserError

DRY_RUN = ("--dry-run", "--dryrun", "-n")
"""Snakemake's spellings of the option."""
_DASHED = re.compile(r"--[a-z]\w*(\.\w+)+=.")
"""A setting that is written like an option; no option of Snakemake has a dot in its name."""


class Arguments(NamedTuple):
    """Arguments after the config."""

    targets: list[str]
    overrides: dict[str, Any]
    """Sections and settings that replace values of the config, nested as there."""
    options: list[str]
    """Options of Snakemake."""


def parse(arguments: Sequence[str]) -> Arguments:
    """Tell targets, settings such as `train.train_steps=50`, and options of Snakemake apart.

    From the first argument on that begins with a minus sign, all are options of Snakemake.

    Raises:
        UserError: a setting has no key or no value, is given twice, or begins with a minus sign.
    """
    if dashed := next((each for each in arguments if _DASHED.match(each)), ""):
        raise UserError(f"{dashed}: settings have no minus sign; write {dashed.lstrip('-')}")
    first = next((i for i, each in enumerate(arguments) if each.startswith("-")), len(arguments))
    request = Arguments([], {}, [*arguments[first:]])
    for argument in arguments[:first]:
        key, equals, _ = argument.partition("=")
        if not equals or "/" in key:
            request.targets.append(argument)
            continue
        add_override(request.overrides, argument)
    return request


def config_option(overrides: dict[str, Any]) -> list[str]:
    """Settings as Snakemake's option --config; each value is YAML on one line."""
    texts = []
    for key, value in overrides.items():
        text = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize, sort_keys=False)
        texts.append(f"{key}={text.removesuffix('...' + os.linesep).strip()}")
    return ["--config", *texts] if texts else []


def check_config(path: Path) -> None:
    """Check that a config file exists, and is YAML with keys.

    Snakemake would show a traceback. The workflow checks the keys and values, since it knows the
    profile and the tables.
    """
    if path.is_dir():
        raise UserError(f"{path}: a folder; name the config file in it")
    if not path.exists():
        near = get_close_matches(path.name, names_in(path.parent, "*.yaml"), n=1)
        advice = f"did you mean {path.parent / near[0]}?" if near else "name your config file"
        raise UserError(f"{path}: no such file; {advice}")
    value = read_yaml(path, "name your config file")
    if not isinstance(value, dict):
        raise UserError(f"{path}: has no keys; write KEY: VALUE, as in config/config.yaml")


def snakefile_option() -> list[str]:
    """Snakemake's option --snakefile, where this folder has no workflow of its own."""
    if any(Path(name).is_file() for name in SNAKEFILES):
        return []
    return ["--snakefile", str(find_repository() / SNAKEFILES[0])]


def snakemake_command(
    config: Path, request: Arguments, *, profile: str, is_dry_run: bool
) -> list[str]:
    """Arguments of Snakemake for a request, without its display."""
    return [
        "snakemake",
        *snakefile_option(),
        *("--profile", str(find_profile(profile))),
        *("--configfile", str(config)),
        *config_option(request.overrides),
        *DRY_RUN[: int(is_dry_run)],
        *request.options,
        *(["--", *request.targets] if request.targets else []),
    ]


def shown(command: Sequence[str]) -> str:
    """A command as a person types it."""
    return shlex.join(command)
