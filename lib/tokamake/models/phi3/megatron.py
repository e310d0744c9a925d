"""A `phi3` in Megatron's terms: modules of a layer, arguments of its function."""

from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    GATED_LAYER,
    rms_norm_arguments,
    rms_norm_fields,
)

ARGUMENTS = {"swiglu": True, "rotary_percent": True, "normalization": "rmsnorm"}
"""Without `rotary_percent`, the whole head rotates, and the model is a `llama`."""

LAYER = GATED_LAYER


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that Megatron's arguments state; biases are refused by name."""
    share = float(args.rotary_percent)
    return {**rms_norm_fields(args, file, is_core=is_core), "partial_rotary_factor": share}


def arguments(architecture: Architecture) -> dict[str, Any]:
    share = architecture.setting("partial_rotary_factor")
    return {**rms_norm_arguments(architecture), "rotary_percent": share}


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    return []
