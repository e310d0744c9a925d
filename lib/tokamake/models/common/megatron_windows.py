"""Megatron-LM's arguments of windows, for all families that have the setting sliding_window."""

from pathlib import Path
from typing import Any

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.families import FAMILIES
from tokamake.config.layer_intervals import interval_of
from tokamake.models.common.megatron_format import unsupported

_LENGTH, _INTERVAL = WINDOW_ARGUMENTS = ("window_size", "window_attn_skip_freq")


def has_windows(family: str) -> bool:
    return "sliding_window" in _settings(family)


def _settings(family: str) -> dict[str, Any]:
    settings: dict[str, Any] = plugins.constant(FAMILIES, family, "SETTINGS")
    return settings


def window_arguments(architecture: Architecture) -> dict[str, Any]:
    """Arguments of an architecture; empty: it has no window.

    Megatron counts the tokens before and after the token itself.
    """
    layers = range(architecture.num_hidden_layers)
    windows = [*filter(None, map(architecture.window, layers))]
    if not windows:
        return {}
    interval = (architecture.model_extra or {}).get("full_attention_interval")
    return {_LENGTH: (windows[0] - 1, 0), _INTERVAL: interval or None}


def window_fields(args: Any, file: Path, *, family: str) -> dict[str, Any]:
    """The inverse of `window_arguments`."""
    size = getattr(args, _LENGTH, None)
    if size is not None and (len(size) != 2 or size[1] != 0):
        raise unsupported(
            args, file, name=_LENGTH, meaning="a window with later tokens", family=family
        )
    fields = {"sliding_window": 0 if size is None else size[0] + 1}  # -1: all tokens
    interval = getattr(args, _INTERVAL, None)
    if isinstance(interval, list | tuple):  # 1: a layer with a window
        interval = interval_of([not has_window for has_window in interval])
        if interval is None:
            raise unsupported(
                args, file, name=_INTERVAL, meaning="full layers at odd places", family=family
            )
    if "full_attention_interval" in _settings(family):
        return {**fields, "full_attention_interval": interval or 0}
    if interval:
        raise unsupported(
            args, file, name=_INTERVAL, meaning="full layers among windowed ones", family=family
        )
    return fields
