"""A `qwen3` in Megatron's terms: modules of a layer, arguments of its function."""

from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    ATTENTION,
    GATED_MLP,
    INPUT_NORM,
    MLP_NORM,
    MegatronModule,
    rms_norm_fields,
)

ARGUMENTS = {"swiglu": True, "qk_layernorm": True, "normalization": "rmsnorm"}
"""Arguments by which a checkpoint's model is known to be of this family."""

LAYER = (
    INPUT_NORM,
    *ATTENTION,
    MegatronModule("self_attention.q_layernorm", ("self_attn.q_norm",)),
    MegatronModule("self_attention.k_layernorm", ("self_attn.k_norm",)),
    MLP_NORM,
    *GATED_MLP,
)
"""Modules of a layer in the order in which Megatron makes them."""

fields = rms_norm_fields
"""Fields of an `Architecture` that Megatron's arguments state.

Biases become fields, too: this family refuses them by name.
"""


def arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of an architecture; the inverse of `fields`."""
    return {**ARGUMENTS, "layernorm_epsilon": architecture.rms_norm_eps}


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings for which Megatron-LM or Megatron-DeepSpeed has no argument."""
    return [] if is_megatron_lm else ["norms of query and key heads"]
