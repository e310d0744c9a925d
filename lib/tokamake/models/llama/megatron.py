"""A `llama` in Megatron's terms: modules of a layer, arguments of its function."""

from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    ATTENTION,
    GATED_MLP,
    INPUT_NORM,
    MLP_NORM,
    rms_norm_fields,
)

ARGUMENTS = {"swiglu": True, "normalization": "rmsnorm"}
"""Arguments by which a checkpoint's model is known to be of this family."""

LAYER = (INPUT_NORM, *ATTENTION, MLP_NORM, *GATED_MLP)
"""Modules of a layer in the order in which Megatron makes them."""

fields = rms_norm_fields
"""Fields of an `Architecture` that Megatron's arguments state."""


def arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of an architecture; the inverse of `fields`."""
    return {**ARGUMENTS, "layernorm_epsilon": architecture.rms_norm_eps}


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings for which Megatron-LM or Megatron-DeepSpeed has no argument."""
    return []
