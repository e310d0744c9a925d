"""A `gpt` in Megatron's terms: modules of a layer, arguments of its function."""

from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    ATTENTION,
    INPUT_NORM,
    MLP,
    MLP_NORM,
    inexpressible_activation,
    layer_norm_arguments,
    layer_norm_fields,
)

ARGUMENTS = {"swiglu": False, "normalization": "layernorm"}

EMBEDDING = {
    "word_embeddings.norm": "model.embed_layernorm",
    "position_embeddings": "model.embed_positions",
}

LAYER = (INPUT_NORM, *ATTENTION, MLP_NORM, *MLP)


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that Megatron's arguments state."""
    has_norm = bool(getattr(args, "embed_layernorm", False))
    return {**layer_norm_fields(args, file, is_core=is_core), "embedding_layernorm": has_norm}


def arguments(architecture: Architecture) -> dict[str, Any]:
    has_norm = architecture.embedding_layernorm
    return {**layer_norm_arguments(architecture), "embed_layernorm": has_norm}


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    settings = inexpressible_activation(architecture, is_megatron_lm=is_megatron_lm)
    if is_megatron_lm and architecture.position_embedding == "alibi":
        settings.append("position_embedding alibi")
    if is_megatron_lm and architecture.embedding_layernorm:
        settings.append("embedding_layernorm")
    return settings
