"""A `bert` in Megatron's terms: modules of a layer, heads, arguments of its function."""

from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.encoder_format import MEGATRON_EMBEDDING, MEGATRON_LAYER
from tokamake.models.common.megatron_format import (
    TANH,
    MegatronModule,
    layer_norm_fields,
)

PROGRAMS = ("pretrain_bert",)

ARGUMENTS = {"swiglu": False, "normalization": "layernorm"}

TENSORS = ("lm_head.dense.weight",)

STACK = "encoder"

EMBEDDING, LAYER = MEGATRON_EMBEDDING, MEGATRON_LAYER

HEADS = (
    MegatronModule("language_model.pooler.dense", ("pooler",)),
    MegatronModule("lm_head", ("masked_token_head",), "vocabulary"),
    MegatronModule("lm_head.dense", ("masked_token_head.dense",)),
    MegatronModule("lm_head.layernorm", ("masked_token_head.layernorm",)),
    MegatronModule("binary_head", ("sentence_order_head",)),
)


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that arguments state; a core head always has an exact GELU."""
    # Megatron's models without the head of the order of sentences have no token types, either.
    has_order = bool(getattr(args, "bert_binary_head", True))
    by_tanh = getattr(args, "openai_gelu", False) and not is_core
    return {
        **layer_norm_fields(args, file, is_core=is_core),
        "head_act": "gelu_new" if by_tanh else "gelu",
        "sentence_order_head": has_order,
        "type_vocab_size": 2 if has_order else 0,
    }


def arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of an architecture; the inverse of `fields`."""
    head_by_tanh = architecture.setting("head_act") in TANH
    return {
        "layernorm_epsilon": architecture.layer_norm_epsilon,
        # With openai_gelu, the head and the MLPs have the tanh; Megatron refuses both arguments.
        "bias_gelu_fusion": architecture.hidden_act in TANH and not head_by_tanh,
        "openai_gelu": head_by_tanh,
        "bert_binary_head": architecture.setting("sentence_order_head"),
    }


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings for which Megatron-LM or Megatron-DeepSpeed has no argument."""
    if architecture.setting("task_head") != "none":
        return [f"task_head {architecture.setting('task_head')}"]
    mlp, head = architecture.hidden_act, architecture.setting("head_act")
    settings = ["hidden_act relu"] if mlp == "relu" else []
    settings += ["head_act relu"] if head == "relu" else []
    if head in TANH and (is_megatron_lm or mlp not in TANH):
        settings.append(f"head_act {head}")
    if mlp in TANH and head not in TANH and not architecture.mlp_bias:
        settings.append(f"hidden_act {mlp} without biases")
    has_order = architecture.setting("sentence_order_head")
    if (num_types := architecture.setting("type_vocab_size")) != (2 if has_order else 0):
        order = "with" if has_order else "without"
        settings.append(f"type_vocab_size {num_types} {order} sentence_order_head")
    return settings
