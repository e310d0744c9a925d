"""Files of config/models: an architecture; settings may follow the name and replace its own."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.families import FAMILIES
from tokamake.config_files import parse_yaml, read_yaml, unknown_key, validate

_SETTINGS_FOLLOW = r":(?=\w+=)"
_OTHER_NAMES = {"num_layers": "num_hidden_layers"}
"""Name in Megatron → name here."""


def architecture_file(path: Path) -> Path:
    """File of an architecture, without settings after its name."""
    return Path(re.split(_SETTINGS_FOLLOW, str(path))[0])


def with_settings(file: Any, settings: Mapping[str, Any], *, others: list[str]) -> str:
    """Name of an architecture's file, followed by settings that replace its own.

    Args:
        others: further keys, for the message about an unknown one.

    Raises:
        ValueError: a setting is unknown or no single value, or there is no file.
    """
    families = plugins.names(FAMILIES)
    own = {name for family in families for name in plugins.constant(FAMILIES, family, "SETTINGS")}
    known = dict.fromkeys([*Architecture.model_fields, *sorted(own), *_OTHER_NAMES])
    for name, value in settings.items():
        if name not in known:
            raise ValueError(unknown_key(name, [*others, *known]))
        if isinstance(value, dict | list) or value is None:
            raise ValueError(f"{name}: {value!r}: give one value, or write it into a file")
        if file in (None, "from_checkpoint"):
            raise ValueError(
                f"{name}: {value!r}: the checkpoint decides the shape; remove it, or name the file "
                "of an architecture, too"
            )
    named = {_OTHER_NAMES.get(name, name): value for name, value in settings.items()}
    return ":".join([str(file), *(f"{name}={value}" for name, value in named.items())])


def read_architecture(path: Path) -> Architecture:
    """Read a file of config/models; for settings after its name, see `model.architecture`."""
    settings = re.split(_SETTINGS_FOLLOW, str(path))[1:]
    value = read_yaml(architecture_file(path), "fix the path, or choose a file of config/models")
    if isinstance(value, dict):
        given = {
            name: parse_yaml(text, str(path))
            for name, _, text in (s.partition("=") for s in settings)
        }
        value = _without_followers(value, given) | given
    return validate(Architecture, value, str(path))


def _without_followers(value: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file, without sizes that follow from the ones that others replace."""
    is_resized = isinstance(given.get("hidden_size"), int) or given.get("family") in plugins.names(
        FAMILIES
    )
    dropped = {"intermediate_size"} if is_resized else set()
    if value.get("num_key_value_heads") == value.get("num_attention_heads"):
        dropped |= {"num_key_value_heads"} if "num_attention_heads" in given else set()
    return {name: each for name, each in value.items() if name not in dropped}
