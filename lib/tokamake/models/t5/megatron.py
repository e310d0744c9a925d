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
    biases,
    mlp_activation,
    norm_epsilon,
)

ARGUMENTS = {"swiglu": False, "normalization": "layernorm"}
"""Arguments by which a checkpoint's model is known to be of this family."""

TENSORS = ("language_model.decoder.layers.0.inter_attention.query.weight",)
"""Tensors that only this family has; its arguments equal those of a GPT."""

STACK = "encoder"
"""Name of the layers in megatron.core."""

EMBEDDING = {"position_embeddings": "model.embed_positions"}
"""Our names of the embedding's modules beside the word embeddings, in Megatron's order."""

LAYER = (INPUT_NORM, *ATTENTION, MLP_NORM, *MLP)
"""Modules of a layer of the encoder in the order in which Megatron makes them."""

DECODER_LAYER = (
    INPUT_NORM,
    *ATTENTION,
    MegatronModule("post_attention_layernorm", ("cross_attn_layernorm",)),
    *CROSS_ATTENTION,
    MegatronModule("post_inter_attention_layernorm", ("post_attention_layernorm",)),
    *MLP,
)
"""Modules of a layer of the decoder in that order."""

HEADS = (MegatronModule("lm_head", ("head",), "vocabulary"),)
"""Modules after the last norm, by their names in the model."""

SECOND_KEYS = {
    "lm_head.output_layer.bias": "output_layer.bias",
    "position_embeddings.weight": "embedding.position_embeddings.weight",
}
"""Further keys of tensors that megatron.core has under two keys, with the first key of each."""

_TANH = ("gelu_new", "gelu_pytorch_tanh")


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that Megatron's arguments state."""
    has_biases = biases(args, file, default=True)
    return {
        "layer_norm_epsilon": norm_epsilon(args, is_core=is_core),
        **has_biases,
        "hidden_act": mlp_activation(args, file, biased=has_biases["mlp_bias"], is_core=is_core),
        "num_decoder_layers": getattr(args, "decoder_num_layers", None) or 0,
    }


def arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of an architecture; the inverse of `fields`."""
    by_tanh = architecture.hidden_act in _TANH
    return {
        **ARGUMENTS,
        "layernorm_epsilon": architecture.layer_norm_epsilon,
        "bias_gelu_fusion": by_tanh and architecture.mlp_bias,
        "openai_gelu": by_tanh and not architecture.mlp_bias,  # Megatron refuses both
        "encoder_num_layers": architecture.num_hidden_layers,
        "decoder_num_layers": architecture.setting("num_decoder_layers"),
        "encoder_seq_length": architecture.max_position_embeddings,
    }


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings for which Megatron-LM or Megatron-DeepSpeed has no argument."""
    activation = architecture.hidden_act
    settings = ["hidden_act relu"] if activation == "relu" else []
    if is_megatron_lm and activation in _TANH and not architecture.mlp_bias:
        settings.append(f"hidden_act {activation} without biases")
    return settings
