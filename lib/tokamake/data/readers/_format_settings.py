"""Formats with settings, such as `warc: {extractor: trafilatura}`.

A reader lists its settings in the literal SETTINGS: name → tuple of choices, the default first.
"""

from collections.abc import Mapping
from typing import Any

from tokamake import plugins
from tokamake.errors import UserError

_FOLDER = "data/readers"


def parse_format(text: str) -> tuple[str, dict[str, str]]:
    """Return the name of a format and the settings that the text states; both may be empty."""
    if text.replace("_", "").isalnum() or not text:
        return text, {}
    from tokamake.config_files import parse_yaml  # imports pydantic: 0.25 s

    value = parse_yaml(text, f"format: {text}")
    if not isinstance(value, Mapping) or len(value) != 1:
        raise UserError(f"format: {text}: give NAME, or NAME: {{SETTING: VALUE}}")
    ((name, stated),) = value.items()
    name = plugins.check(_FOLDER, str(name))
    return name, _checked(name, stated)


def default_settings(name: str) -> dict[str, str]:
    return {key: choices[0] for key, choices in _choices(name).items()}


def join_format(name: str, settings: Mapping[str, str]) -> str:
    """Return the text that `parse_format` parses; the name alone if all settings are defaults."""
    defaults = default_settings(name)
    stated = [f"{key}: {value}" for key, value in settings.items() if value != defaults[key]]
    return f"{name}: {{{', '.join(stated)}}}" if stated else name


def _checked(name: str, stated: Any) -> dict[str, str]:
    if not isinstance(stated, Mapping):
        raise UserError(f"format: {name}: {stated!r}: give settings as {{SETTING: VALUE}}")
    choices = _choices(name)
    for key, value in stated.items():
        if key not in choices:
            known = ", ".join(choices) or "none"
            raise UserError(f"format: {name}: {key}: unknown setting; its settings: {known}")
        if value not in choices[key]:
            raise UserError(
                f"format: {name}: {key}: {value}: choose one of {', '.join(choices[key])}"
            )
    return dict(stated)


def _choices(name: str) -> dict[str, tuple[str, ...]]:
    return dict(plugins.constant(_FOLDER, name, "SETTINGS", default=()))
