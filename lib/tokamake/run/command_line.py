"""The command of Snakemake that `tokamake run` starts, and the checks of what a user types."""

import os
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tokamake.config_files import parse_yaml, read_yaml
from tokamake.errors import UserError

_PROFILE_FILES = ("profile.yaml", "config.v8+.yaml", "config.yaml")
"""Files that make a folder a profile of Snakemake."""
_REPOSITORY = Path(__file__).resolve().parents[3]
"""Clone of tokamake, if it is installed from one in place."""
DRY_RUN = ("--dry-run", "--dryrun", "-n")
"""Snakemake's spellings of the option."""
_SNAKEFILES = ("workflow/Snakefile", "Snakefile")


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
        UserError: a setting has no key or no value, or is given twice.
    """
    first = next((i for i, each in enumerate(arguments) if each.startswith("-")), len(arguments))
    request = Arguments([], {}, [*arguments[first:]])
    for argument in arguments[:first]:
        key, equals, text = argument.partition("=")
        if not equals or "/" in key:
            request.targets.append(argument)
            continue
        _set(request.overrides, key, text=text)
    return request


def _set(overrides: dict[str, Any], key: str, *, text: str) -> None:
    *sections, name = key.split(".")
    if not all(part.isidentifier() for part in (*sections, name)) or not text:
        raise UserError(
            f"{key}={text}: not a setting; write SECTION.KEY=VALUE, as in train.train_steps=50"
        )
    section = overrides
    for part in sections:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise UserError(f"{key}={text}: {part} has a value already; give one of both")
    if name in section:
        raise UserError(f"{key}={text}: given twice; give it once")
    section[name] = value = parse_yaml(text, f"{key}={text}")
    if value is None:  # Snakemake would read a text
        raise UserError(f"{key}={text}: null cannot be given here; change the config file")


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
        near = get_close_matches(path.name, _names(path.parent, "*.yaml"), n=1)
        advice = f"did you mean {path.parent / near[0]}?" if near else "name your config file"
        raise UserError(f"{path}: no such file; {advice}")
    value = read_yaml(path, "name your config file")
    if not isinstance(value, dict):
        raise UserError(f"{path}: has no keys; write KEY: VALUE, as in config/config.yaml")


def find_profile(profile: str) -> Path:
    """Folder of a profile, given by its path, or by its name.

    Raises:
        UserError: there is none, or its file is no YAML with keys.
    """
    folders = [Path(profile), Path("profiles", profile), _REPOSITORY / "profiles" / profile]
    for folder in folders:
        files = [folder / name for name in _PROFILE_FILES if (folder / name).is_file()]
        for path in files:
            if not isinstance(read_yaml(path, "name a profile"), dict):
                raise UserError(f"{path}: has no keys; write KEY: VALUE, an option of Snakemake")
        if files:
            return folder
    known = sorted({*_names(Path("profiles"), "*/"), *_names(_REPOSITORY / "profiles", "*/")})
    near = get_close_matches(Path(profile).name, known, n=1)
    advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"--profile {profile}: no profile with this name; {advice}")


def _names(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def snakefile_option() -> list[str]:
    """Snakemake's option --snakefile, where this folder has no workflow of its own."""
    if any(Path(name).is_file() for name in _SNAKEFILES):
        return []
    return ["--snakefile", str(find_repository() / _SNAKEFILES[0])]


def find_repository() -> Path:
    """The clone of tokamake: the one that is installed in place, or this folder.

    Raises:
        UserError: neither has the workflow.
    """
    for folder in (_REPOSITORY, Path.cwd()):
        if (folder / _SNAKEFILES[0]).is_file():
            return folder
    raise UserError(
        f"{Path.cwd()}: has no workflow/Snakefile; run it in a clone of tokamake, or write a "
        "Snakefile that uses tokamake as a module (docs/howto/module.md)"
    )


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
