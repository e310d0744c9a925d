"""A `qwen3` in Megatron's terms: modules of a layer, arguments of its function."""

from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    ATTENTION,
    INPUT_NORM,
    MLP_NORM,
    MLP_OUTPUT,
    MegatronModule,
    biases,
    norm_epsilon,
)

ARGUMENTS = {"swiglu": True, "qk_layernorm": True, "normalization": "rmsnorm"}
"""Arguments by which a checkpoint's model is known to be of this family."""

LAYER = (
    INPUT_NORM,
    *ATTENTION,
    MegatronModule("self_attention.q_layernorm", ("self_attn.q_norm",)),
    MegatronModule("self_attention.k_layernorm", ("self_attn.k_norm",)),
    MLP_NORM,
    MegatronModule("mlp.dense_h_to_4h", ("mlp.gate_proj", "mlp.up_proj"), "rows"),
    MLP_OUTPUT,
)
"""Modules of a layer in the order in which Megatron makes them."""


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that Megatron's arguments state; see `llama` for the arguments.

    Biases become fields, too: this family refuses them by name.
    """
    return {
        "rms_norm_eps": norm_epsilon(args, is_core=is_core),
        **biases(args, file, default=False),
    }


def arguments(architecture: Architecture) -> dict[str, Any]:
    """The inverse."""
    return {**ARGUMENTS, "layernorm_epsilon": architecture.rms_norm_eps}


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings for which Megatron-LM or Megatron-DeepSpeed has no argument."""
    return [] if is_megatron_lm else ["norms of query and key heads"]
