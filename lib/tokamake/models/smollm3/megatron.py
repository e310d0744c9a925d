"""A `smollm3` in Megatron's terms: modules of a layer, arguments of its function."""

from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.config.layer_intervals import interval_of
from tokamake.models.common.megatron_format import (
    GATED_LAYER,
    rms_norm_arguments,
    rms_norm_fields,
    unsupported,
)

ARGUMENTS = {"swiglu": True, "no_rope_freq": True, "normalization": "rmsnorm"}

LAYER = GATED_LAYER


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that Megatron's arguments state."""
    interval = args.no_rope_freq
    if isinstance(interval, list | tuple):  # 1: a layer without positions
        interval = interval_of(interval)
    if interval is None:
        raise unsupported(
            args,
            file,
            name="no_rope_freq",
            meaning="layers without positions at odd places",
            family="smollm3",
        )
    return {
        **rms_norm_fields(args, file, is_core=is_core),
        "no_rope_layer_interval": interval,
    }


def arguments(architecture: Architecture) -> dict[str, Any]:
    interval = architecture.setting("no_rope_layer_interval")
    return {**rms_norm_arguments(architecture), "no_rope_freq": interval or None}


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings without an argument: Megatron-LM needs an interval that divides the layers."""
    interval = architecture.setting("no_rope_layer_interval")
    if not interval:
        return []
    if not is_megatron_lm:
        return ["layers without positions"]
    uneven = architecture.num_hidden_layers % interval
    return [
        f"no_rope_layer_interval {interval} of a number of layers that it does not divide"
    ] * bool(uneven)
