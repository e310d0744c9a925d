"""Windows of attention in config.json: their length, and the layers that have none.

transformers lists the kind of each layer, layer_types. Older files state an interval or nothing.
"""

from collections.abc import Mapping, Sequence
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
    are alike."""
    reads_pattern: bool = False
    """Whether transformers reads sliding_window_pattern, its older key of the interval."""

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
        number = config.get("num_hidden_layers")
        if kinds and number and len(kinds) < number:
            return f"layer_types: has {len(kinds)} entries for {number} layers; give one a layer"
        if self.interval is None:
            return self._differing_layer(config, kinds)
        pattern = config.get("sliding_window_pattern", self.interval)
        if not kinds and not self.reads_pattern and pattern != self.interval:
            return (
                f"sliding_window_pattern: {pattern!r}: transformers does not read it in models of "
                "this type; give layer_types"
            )
        if self.fields(config)["full_attention_interval"] is not None:
            return None
        return (
            f"layer_types: {[*kinds]}: is not supported; choose a model in which layers without a "
            "window are equally far from each other"
        )

    def _differing_layer(self, config: Mapping[str, Any], kinds: Sequence[str]) -> str | None:
        """Message about a layer that is not as `sliding_window` says, which all layers are."""
        length = self.fields(config)["sliding_window"]
        kind = _WINDOWED if length else _FULL
        if other := sorted({*kinds} - {kind}):
            return (
                f"layer_types: {other[0]!r} is not supported with sliding_window {length or None}; "
                f"choose a model in which all layers have {kind}"
            )
        return None


def without_windows(config: Mapping[str, Any]) -> str | None:
    """Message about layers of another kind than full attention."""
    if other := sorted({*(config.get("layer_types") or ())} - {_FULL}):
        return f"layer_types: {other[0]!r} is not supported; choose a model with {_FULL}"
    return None
