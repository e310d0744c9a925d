"""A `qwen3` in Megatron's terms: modules of a layer, arguments of its function."""

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    ATTENTION,
    GATED_MLP,
    INPUT_NORM,
    MLP_NORM,
    MegatronModule,
    rms_norm_arguments,
    rms_norm_fields,
)

ARGUMENTS = {"swiglu": True, "qk_layernorm": True, "normalization": "rmsnorm"}

LAYER = (
    INPUT_NORM,
    *ATTENTION,
    MegatronModule("self_attention.q_layernorm", ("self_attn.q_norm",)),
    MegatronModule("self_attention.k_layernorm", ("self_attn.k_norm",)),
    MLP_NORM,
    *GATED_MLP,
)

fields = rms_norm_fields
"""Fields of an `Architecture` that Megatron's arguments state.

Biases become fields, too: this family refuses them by name.
"""
arguments = rms_norm_arguments


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    return [] if is_megatron_lm else ["norms of query and key heads"]
