"""Rotary positions in config.json, in the dialects of transformers 4 and 5.

Version 4 has rope_scaling beside the base, version 5 has all in rope_parameters. Some types nest
them by kind of layer.
"""

import json
from collections.abc import Mapping
from typing import Any

from tokamake.config.rope_scaling import SCALING

_KINDS = ("full_attention", "sliding_attention")


def rope_key(config: Mapping[str, Any]) -> str:
    # transformers reads the older key first.
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def rope_parameters(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary positions of layers without and with a window."""
    older, newer = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if not any(kind in newer for kind in _KINDS):
        return dict(older or newer), {}
    # As in transformers, the older key updates the entry of layers without a window.
    whole, local = (newer.get(kind) or {} for kind in _KINDS)
    return {**whole, **older}, dict(local)


def nesting_problem(config: Mapping[str, Any], *, by_kind: bool, model_type: str) -> str | None:
    """Message about rope_parameters that transformers would not read in such models.

    Args:
        by_kind: whether layers with a window have rotary positions of their own.
    """
    stated = config.get("rope_parameters") or {}
    if by_kind:
        is_read, needed = {*stated} <= {*_KINDS}, f"the keys {' and '.join(_KINDS)} alone"
    else:
        is_read, needed = {*stated}.isdisjoint(_KINDS), "the same positions for all layers"
    if not is_read:
        return (
            f"rope_parameters: {json.dumps(stated)} is not supported; {model_type} needs {needed}"
        )
    if by_kind and not rope_parameters(config)[0].get("truncate", True):
        return (
            f"{rope_key(config)}: truncate: transformers does not read it in models of type "
            f"{model_type}; set it to true"
        )
    return None


def rope_type(parameters: Mapping[str, Any]) -> str:
    kind: str = parameters.get("rope_type") or parameters.get("type") or "default"
    return "longrope" if kind == "su" else kind  # its name in early files of Phi-3


def scaling_keys(kind: str) -> set[str]:
    return {"factor"}.union(*SCALING[kind]) if kind in SCALING else set()
