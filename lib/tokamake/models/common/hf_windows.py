"""Windows of attention in config.json: their length, and the layers that have none.

transformers lists the kind of each layer, layer_types. Older files state an interval or nothing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokamake.config.architecture import Architecture
from tokamake.config.layer_intervals import interval_of

_WINDOWED, _FULL = "sliding_attention", "full_attention"


class Windows(NamedTuple):
    """Windows of one of transformers' model types."""

    length: int | None
    """sliding_window of a config without it; None: all tokens."""
    interval: int | None = None
    """Every how many layers one has no window, in a config that does not say it; None: all layers
    are alike, and layer_types has no effect."""

    def fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of an `Architecture`; the interval is None if layers are at odd places."""
        fields = {"sliding_window": config.get("sliding_window", self.length) or 0}
        if self.interval is None:
            return fields
        kinds = config.get("layer_types")
        stated = config.get("sliding_window_pattern", self.interval)  # of transformers 4
        if kinds is None:
            return {**fields, "full_attention_interval": stated}
        kinds = kinds[: config.get("num_hidden_layers") or len(kinds)]
        interval = interval_of([kind == _FULL for kind in kinds], stated)
        return {**fields, "full_attention_interval": interval}

    def keys(self, architecture: Architecture) -> dict[str, Any]:
        """Keys of config.json; the inverse of `fields`."""
        keys = {"sliding_window": architecture.setting("sliding_window") or None}
        if self.interval is None:
            return keys
        windows = map(architecture.window, range(architecture.num_hidden_layers))
        kinds = [_FULL if window is None else _WINDOWED for window in windows]
        pattern = architecture.setting("full_attention_interval")
        return {**keys, "layer_types": kinds, "sliding_window_pattern": pattern}

    def problem(self, config: Mapping[str, Any]) -> str | None:
        """Message about layers whose kinds our model cannot have."""
        kinds = config.get("layer_types") or ()
        if other := sorted({*kinds} - {_WINDOWED, _FULL}):
            return f"layer_types: {other[0]!r} is not supported; choose a model with {_FULL}"
        if self.interval is None or self.fields(config)["full_attention_interval"] is not None:
            return None
        return (
            f"layer_types: {[*kinds]}: is not supported; choose a model in which layers without a "
            "window are equally far from each other"
        )


def without_windows(config: Mapping[str, Any]) -> str | None:
    """Message about layers of another kind than full attention."""
    if other := sorted({*(config.get("layer_types") or ())} - {_FULL}):
        return f"layer_types: {other[0]!r} is not supported; choose a model with {_FULL}"
    return None
