"""Settings of which a plug-in uses some: those that it names get its values, others are refused.

A plug-in's constant SETTINGS is a literal, so nothing is imported to read it.
"""

from collections.abc import Mapping
from typing import Any

from tokamake import plugins


def fill_in(values: Any, *, folder: str, default: str, states: Mapping[str, str]) -> Any:
    """Give the settings that a plug-in uses its values where the user gives none.

    A resolved run, with these values written out and the others empty, passes unchanged.

    Args:
        values: what a section of the config says, with the plug-in's `name`.
        folder: of the plug-ins.
        default: name of the plug-in if `values` has none.
        states: setting → what it states; settings that state the same exclude each other.

    Returns:
        `values` with those of the plug-in.

    Raises:
        ValueError: a setting is of no use to the plug-in, or two state the same.
    """
    name = values.get("name", default) if isinstance(values, Mapping) else None
    if name not in plugins.names(folder):
        return values  # The fields say what is wrong.
    used: dict[str, Any] = plugins.constant(folder, name, "SETTINGS")
    given = {key: value for key in states if (value := values.get(key)) is not None}
    stated: dict[str, str] = {}
    for key, value in given.items():
        if states[key] not in {states[each] for each in used}:
            raise ValueError(
                f"{key}: {value}: {name} makes no use of it, but of {', '.join(used)}; remove it"
            )
        if (other := stated.setdefault(states[key], key)) != key:
            raise ValueError(f"{other} and {key} state the same; give one of them")
    published = {key: value for key, value in used.items() if states[key] not in stated}
    return {**values, **published}
