"""Settings of a command line, such as `train.train_steps=50`, that replace values of a config."""

from collections.abc import Iterable
from typing import Any

from tokamake.config_files import parse_yaml
from tokamake.errors import UserError


def read_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Sections and settings, nested as in the config.

    Raises:
        UserError: an argument is no setting, has no key or no value, or is given twice.
    """
    overrides: dict[str, Any] = {}
    for argument in arguments:
        if "=" not in argument:
            raise UserError(f"{argument}: not a setting; write SECTION.KEY=VALUE")
        add_override(overrides, argument)
    return overrides


def add_override(overrides: dict[str, Any], argument: str) -> None:
    """Add a setting that a user typed; its value is YAML."""
    key, _, text = argument.partition("=")
    *sections, name = key.split(".")
    if not all(part.isidentifier() for part in (*sections, name)) or not text:
        raise UserError(
            f"{argument}: not a setting; write SECTION.KEY=VALUE, as in train.train_steps=50"
        )
    section = overrides
    for part in sections:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise UserError(f"{argument}: {part} has a value already; give one of both")
    if name in section:
        raise UserError(f"{argument}: given twice; give it once")
    section[name] = value = parse_yaml(text, argument)
    if value is None:  # Snakemake would read a text
        raise UserError(f"{argument}: null cannot be given here; change the config file")


def merged(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Settings with replaced values, as Snakemake merges `--config`."""
    result = dict(values)
    for key, value in overrides.items():
        before = result.get(key)
        is_section = isinstance(before, dict) and isinstance(value, dict)
        result[key] = merged(before or {}, value) if is_section else value
    return result
