"""Facts of families, which the folders lib/tokamake/models/<family> state as literals."""

from collections.abc import Mapping
from typing import Any

from tokamake import plugins
from tokamake.config.objective import objectives_of

FAMILIES = "models/*/model"
"""Folders of the families, as plug-ins."""


def objectives(family: str) -> tuple[str, ...]:
    """Objectives that a family learns: they need its stacks of layers."""
    return objectives_of(stacks(family))


def stacks(family: str) -> str:
    """Stacks of layers of a family: decoder, encoder, encoder_decoder or biencoder."""
    return str(plugins.constant(FAMILIES, family, "STACKS", default="decoder"))


SEVERAL_STACKS = {
    "encoder_decoder": "an encoder and a decoder",
    "biencoder": "two towers",
    "retro": "a decoder and an encoder of neighbors",
}
"""Families with several stacks of layers, in words."""


def family_settings(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that a family knows: a tuple of choices, the default first, or a default alone.

    A family that wraps another one also knows the fields of the other one.
    """
    settings: dict[str, Any] = plugins.constant(FAMILIES, family, "SETTINGS")
    if wrapped := wrapped_family(family, values):
        return {**plugins.constant(FAMILIES, wrapped, "SETTINGS"), **settings}
    return settings


def wrapped_family(family: str, values: Mapping[str, Any]) -> str:
    """Family that a family wraps: the value of the setting that its `WRAPS` names; empty: none."""
    name: str = plugins.constant(FAMILIES, family, "WRAPS", default="")
    if not name:
        return ""
    choices: tuple[str, ...] = plugins.constant(FAMILIES, family, "SETTINGS")[name]
    return values[name] if values.get(name) in choices else choices[0]


def default_setting(choices: Any) -> Any:
    """Default of a setting: the first of its choices, or its only value."""
    return choices[0] if isinstance(choices, tuple) else choices
