"""Settings that depend on a plug-in: add its published values, refuse settings it does not use.

The constant SETTINGS of a plug-in is a literal, so reading it imports nothing.
"""

from collections.abc import Mapping
from typing import Any

from tokamake import plugins


def add_published_values(
    section: Any, *, folder: str, default: str, quantities: Mapping[str, str]
) -> Any:
    """Add the published values of a plug-in for the settings that the user left empty.

    A resolved run contains these values already and passes unchanged.

    Args:
        section: a section of the config, with the plug-in's `name`.
        folder: folder of the plug-ins.
        default: name of the plug-in if `section` has none.
        quantities: setting → quantity that it sets. Settings of the same quantity exclude each
            other.

    Returns:
        `section` with the values of the plug-in.

    Raises:
        ValueError: the plug-in does not use a setting, or two settings set the same quantity.
    """
    name = section.get("name", default) if isinstance(section, Mapping) else None
    if name not in plugins.names(folder):
        return section  # The validators of the fields report the mistake.
    published: dict[str, Any] = plugins.constant(folder, name, "SETTINGS")
    used_quantities = {quantities[key] for key in published}
    key_of_quantity: dict[str, str] = {}
    for key, quantity in quantities.items():
        if (value := section.get(key)) is None:
            continue
        if quantity not in used_quantities:
            raise ValueError(
                f"{key}: {value}: {name} does not use it, only {', '.join(published)}; remove it"
            )
        if (first := key_of_quantity.setdefault(quantity, key)) != key:
            raise ValueError(f"{first} and {key} set the same quantity; keep one of them")
    missing = {k: v for k, v in published.items() if quantities[k] not in key_of_quantity}
    return {**section, **missing}
