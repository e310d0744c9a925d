"""A `biencoder` in Megatron's terms (pretrain_ict): towers, modules, arguments."""

from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.biencoder.hf import towers as towers
from tokamake.models.common.encoder_format import MEGATRON_EMBEDDING, MEGATRON_LAYER
from tokamake.models.common.megatron_format import (
    MegatronModule,
    inexpressible_activation,
    layer_norm_arguments,
    layer_norm_fields,
)

PROGRAMS = ("pretrain_ict",)

ARGUMENTS = {"swiglu": False, "normalization": "layernorm"}

TENSORS = ("*_model.language_model.embedding.word_embeddings.weight",)

STACK = ""

EMBEDDING, LAYER = MEGATRON_EMBEDDING, MEGATRON_LAYER

HEADS = (MegatronModule("projection_enc", ("projection",)),)

_NUM_TYPES = 2
"""Megatron's towers always have two types of tokens, and use the first one."""


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that arguments state."""
    return {
        **layer_norm_fields(args, file, is_core=is_core),
        "type_vocab_size": _NUM_TYPES,
        "shared_towers": bool(getattr(args, "biencoder_shared_query_context_model", False)),
        "projection_dim": getattr(args, "biencoder_projection_dim", None) or 0,
    }


def arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of an architecture; the inverse of `fields`."""
    return {
        **layer_norm_arguments(architecture),
        "biencoder_shared_query_context_model": architecture.setting("shared_towers"),
        "biencoder_projection_dim": architecture.setting("projection_dim"),
    }


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings for which Megatron-LM or Megatron-DeepSpeed has no argument."""
    settings = inexpressible_activation(architecture, is_megatron_lm=is_megatron_lm)
    if (num_types := architecture.setting("type_vocab_size")) != _NUM_TYPES:
        settings.append(f"type_vocab_size {num_types}")
    return settings
