"""A `gpt` in Megatron's terms: modules of a layer, arguments of its function."""

from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    ATTENTION,
    INPUT_NORM,
    MLP,
    MLP_NORM,
    biases,
    mlp_activation,
    norm_epsilon,
)

ARGUMENTS = {"swiglu": False, "normalization": "layernorm"}
"""Arguments by which a checkpoint's model is known to be of this family."""

EMBEDDING = {
    "word_embeddings.norm": "model.embed_layernorm",
    "position_embeddings": "model.embed_positions",
}
"""Our names of the embedding's modules beside the word embeddings, in Megatron's order."""

LAYER = (INPUT_NORM, *ATTENTION, MLP_NORM, *MLP)
"""Modules of a layer in the order in which Megatron makes them."""

_TANH = ("gelu_new", "gelu_pytorch_tanh")


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that Megatron's arguments state."""
    has_biases = biases(args, file, default=True)
    return {
        "layer_norm_epsilon": norm_epsilon(args, is_core=is_core),
        **has_biases,
        "embedding_layernorm": bool(getattr(args, "embed_layernorm", False)),
        "hidden_act": mlp_activation(args, file, biased=has_biases["mlp_bias"], is_core=is_core),
    }


def arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of an architecture; the inverse of `fields`."""
    by_tanh = architecture.hidden_act in _TANH
    return {
        **ARGUMENTS,
        "layernorm_epsilon": architecture.layer_norm_epsilon,
        "embed_layernorm": architecture.embedding_layernorm,
        "bias_gelu_fusion": by_tanh and architecture.mlp_bias,
        "openai_gelu": by_tanh and not architecture.mlp_bias,  # Megatron refuses both
    }


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings for which Megatron-LM or Megatron-DeepSpeed has no argument."""
    settings, activation = [], architecture.hidden_act
    if activation == "relu":
        settings.append("hidden_act relu")
    if is_megatron_lm and activation in _TANH and not architecture.mlp_bias:
        settings.append(f"hidden_act {activation} without biases")
    if is_megatron_lm and architecture.position_embedding == "alibi":
        settings.append("position_embedding alibi")
    if is_megatron_lm and architecture.embedding_layernorm:
        settings.append("embedding_layernorm")
    return settings
