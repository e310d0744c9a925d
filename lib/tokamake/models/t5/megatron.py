"""A `t5` in Megatron's terms: modules of the layers of both stacks, arguments of its function."""

from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    ATTENTION,
    CROSS_ATTENTION,
    INPUT_NORM,
    MLP,
    MLP_NORM,
    MegatronModule,
    inexpressible_activation,
    layer_norm_arguments,
    layer_norm_fields,
)

PROGRAMS = ("pretrain_t5",)

ARGUMENTS = {"swiglu": False, "normalization": "layernorm"}

TENSORS = ("language_model.decoder.layers.0.inter_attention.query.weight",)

STACK = "encoder"

EMBEDDING = {"position_embeddings": "model.embed_positions"}

LAYER = (INPUT_NORM, *ATTENTION, MLP_NORM, *MLP)

DECODER_LAYER = (
    INPUT_NORM,
    *ATTENTION,
    MegatronModule("post_attention_layernorm", ("cross_attn_layernorm",)),
    *CROSS_ATTENTION,
    MegatronModule("post_inter_attention_layernorm", ("post_attention_layernorm",)),
    *MLP,
)

HEADS = (MegatronModule("lm_head", ("head",), "vocabulary"),)

SECOND_KEYS = (
    (r"^output_layer\.bias$", "lm_head.output_layer.bias"),
    (r"^embedding\.position_embeddings\.", "position_embeddings."),
)
"""Patterns of keys of tensors that megatron.core has under two keys, and their second keys."""

inexpressible = inexpressible_activation


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that Megatron's arguments state."""
    num_decoder_layers = getattr(args, "decoder_num_layers", None) or 0
    of_layers = layer_norm_fields(args, file, is_core=is_core)
    return {**of_layers, "num_decoder_layers": num_decoder_layers}


def arguments(architecture: Architecture) -> dict[str, Any]:
    return {
        **layer_norm_arguments(architecture),
        "encoder_num_layers": architecture.num_hidden_layers,
        "decoder_num_layers": architecture.setting("num_decoder_layers"),
        "encoder_seq_length": architecture.max_position_embeddings,
    }
