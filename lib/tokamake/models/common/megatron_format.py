"""Contents of a family's megatron.py, by which `checkpoint.megatron_model` reads and writes.

Names here are Megatron-DeepSpeed's; megatron.core's names are translated to them. A family has
ARGUMENTS and TENSORS (names or patterns) by which its checkpoints are recognized, PROGRAMS that
train it alone, the modules of a LAYER, of a DECODER_LAYER and of its HEADS, in Megatron's order,
our names of modules of the EMBEDDING beside the word embeddings, and the name of the STACK of
layers in megatron.core, empty if that has no such model. `towers` are modules that each have all
of these.
`fields` of an `Architecture` follow from Megatron's arguments, `arguments` are the inverse, and
`inexpressible` settings have no argument in Megatron-LM or in Megatron-DeepSpeed.
"""

import reprlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokamake.config.architecture import Architecture
from tokamake.errors import UserError


class MegatronModule(NamedTuple):
    """A module of one of Megatron's layers, and the modules here whose tensors it holds."""

    name: str
    """In Megatron's layer. With `{}`, our tensors are stacks along their first dimension, such as
    experts; Megatron has a module for each, with its number there."""
    ours: tuple[str, ...]
    """In a layer of Hugging Face's Llama. Modules that an architecture lacks are left out."""
    split: Literal["copied", "rows", "columns", "heads", "vocabulary"] = "copied"
    """How tensor-parallel ranks share it: each has all of it, some outputs, some inputs, some key
    and value heads with their query heads, or some tokens of the padded vocabulary."""

    decays: bool | None = None
    """Whether its tensors have weight decay; None: if they have two or more dimensions."""


ATTENTION = (
    MegatronModule(
        "self_attention.query_key_value",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "heads",
    ),
    MegatronModule("self_attention.dense", ("self_attn.o_proj",), "columns"),
)
"""Attention of most families."""
CROSS_ATTENTION = (
    MegatronModule("inter_attention.query", ("cross_attn.q_proj",), "rows"),
    MegatronModule(
        "inter_attention.key_value", ("cross_attn.k_proj", "cross_attn.v_proj"), "heads"
    ),
    MegatronModule("inter_attention.dense", ("cross_attn.o_proj",), "columns"),
)
"""Cross-attention of decoders."""
INPUT_NORM = MegatronModule("input_layernorm", ("input_layernorm",))
MLP_NORM = MegatronModule("post_attention_layernorm", ("post_attention_layernorm",))
_MLP_OUTPUT = MegatronModule("mlp.dense_4h_to_h", ("mlp.down_proj",), "columns")
MLP = (MegatronModule("mlp.dense_h_to_4h", ("mlp.up_proj",), "rows"), _MLP_OUTPUT)
GATED_MLP = (
    MegatronModule("mlp.dense_h_to_4h", ("mlp.gate_proj", "mlp.up_proj"), "rows"),
    _MLP_OUTPUT,
)
GATED_LAYER = (INPUT_NORM, *ATTENTION, MLP_NORM, *GATED_MLP)
"""A Llama's layer."""


TANH = ("gelu_new", "gelu_pytorch_tanh")
"""Values of hidden_act that approximate GELU by tanh."""


def first(args: Any, *names: str) -> Any:
    """The first of several arguments that exists and is not None."""
    return next((value for name in names if (value := getattr(args, name, None)) is not None), None)


def norm_epsilon(args: Any, *, is_core: bool) -> float:
    """Epsilon of the norms; megatron.core reads norm_epsilon before the older name."""
    names = (
        ("norm_epsilon", "layernorm_epsilon") if is_core else ("layernorm_epsilon", "norm_epsilon")
    )
    epsilon = first(args, *names)
    return 1e-5 if epsilon is None else epsilon


def biases(args: Any, file: Path, *, default: bool) -> dict[str, Any]:
    """attention_bias and mlp_bias, which one argument of Megatron sets; `default` without it."""
    stated = getattr(args, "add_bias_linear", None)
    has_biases = default if stated is None else bool(stated)
    if getattr(args, "add_qkv_bias", False) and not has_biases:
        raise unsupported(
            args, file, name="add_qkv_bias", meaning="biases of queries, keys and values alone"
        )
    return {"attention_bias": has_biases, "mlp_bias": has_biases}


def mlp_activation(args: Any, file: Path, *, biased: bool, is_core: bool) -> str:
    """hidden_act of MLPs without a gate."""
    # Megatron's kernel that fuses the bias approximates GELU by tanh; its plain GELU is exact.
    fused = getattr(args, "bias_gelu_fusion", None)
    if biased and (fused is None or fused):
        if getattr(args, "onnx_safe", False) and not is_core:
            raise UserError(
                f"{file}: args.onnx_safe: {args.onnx_safe!r}: Megatron versions use "
                "different GELUs with it and bias_gelu_fusion; remove the one that had no effect"
            )
        return "gelu_new"
    by_tanh = getattr(args, "openai_gelu", False) and not is_core
    return "gelu_new" if by_tanh else "gelu"


def layer_norm_fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """`fields` of a family with LayerNorms and MLPs without a gate, whose biases are on by default.

    A UserError says that Megatron's versions disagree on the meaning of the arguments.
    """
    has_biases = biases(args, file, default=True)
    return {
        "layer_norm_epsilon": norm_epsilon(args, is_core=is_core),
        **has_biases,
        "hidden_act": mlp_activation(args, file, biased=has_biases["mlp_bias"], is_core=is_core),
    }


def layer_norm_arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of norms and activation; the inverse of `layer_norm_fields`."""
    by_tanh = architecture.hidden_act in TANH
    return {
        "layernorm_epsilon": architecture.layer_norm_epsilon,
        "bias_gelu_fusion": by_tanh and architecture.mlp_bias,
        "openai_gelu": by_tanh and not architecture.mlp_bias,  # Megatron refuses both
    }


def inexpressible_activation(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """The activation, if Megatron-LM or Megatron-DeepSpeed has no argument for it."""
    activation = architecture.hidden_act
    if activation == "relu":
        return ["hidden_act relu"]
    if is_megatron_lm and activation in TANH and not architecture.mlp_bias:
        return [f"hidden_act {activation} without biases"]
    return []


def rms_norm_fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """`fields` of a family with RMSNorms, whose biases are off by default."""
    return {
        "rms_norm_eps": norm_epsilon(args, is_core=is_core),
        **biases(args, file, default=False),
    }


def rms_norm_fields_without_biases(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """`fields` of a family with RMSNorms whose `ARGUMENTS` decide about biases."""
    return {"rms_norm_eps": norm_epsilon(args, is_core=is_core)}


def rms_norm_arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's argument of RMSNorms; the inverse of `rms_norm_fields`."""
    return {"layernorm_epsilon": architecture.rms_norm_eps}


def unsupported(
    args: Any, file: Path, *, name: str, meaning: str, family: str | None = None
) -> UserError:
    """Error: an argument asks for a feature that a family lacks; None: every possible family."""
    value = reprlib.repr(getattr(args, name, None))
    lacking = (
        f"family {family} does not have"
        if family
        else "no family of tokamake combines with the other arguments"
    )
    return UserError(
        f"{file}: args.{name}: {value}: means {meaning}, which {lacking}; give a checkpoint of a "
        "model without"
    )
