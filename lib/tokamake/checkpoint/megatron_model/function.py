"""What Megatron's arguments say of the function that a model is, which no tensor's shape tells.

Each becomes part of our architecture, or is refused: a model that computes something else with the
same weights would be silently wrong. What brings tensors of its own is refused by their names, too.
"""

import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokamake.checkpoint.torch_files.allowed_globals import StandIn
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

_REFUSED = {
    "layers of several experts": (
        *("num_experts", "ds_num_experts", "num_experts_switch", "num_moe_experts"),
    ),
    "norms whose weights count from 1": ("apply_layernorm_1p", "layernorm_zero_centered_gamma"),
    "norms at other places in a layer": (
        *("apply_residual_connection_post_layernorm", "use_post_ln", "parallel_layernorm"),
    ),
    "attention and MLP side by side": ("parallel_attn", "parallel_attention_mlp"),
    "norms of queries and keys": ("qk_layernorm", "qk_l2_norm"),
    "latent attention": ("multi_latent_attention",),
    "attention to a window": ("window_size", "sliding_window", "window_attn_skip_freq"),
    "attention of another kind": (
        *("linear_attention_freq", "linear_attention_type", "experimental_attention_variant"),
        *("attention_output_gate", "retro_add_retriever"),
    ),
    "attention with another softmax": (
        *("softmax_type", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "another activation": (
        *("squared_relu", "quick_geglu", "glu_activation", "glu_linear_offset"),
        "activation_func_clamp_value",
    ),
    "scales of µP": ("use_mup", "scaling_recipe"),
    "layers that differ": (
        *("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"),
        *("hybrid_attention_ratio", "hybrid_mlp_ratio", "heterogeneous_layers_config_path"),
        *("heterogeneous_layers_config_encoded_json", "mtp_num_layers"),
    ),
}
"""What no family of ours has, and the arguments that ask for it where they are not empty."""
_REFUSED_IF_ROTARY = {
    "positions that turn a part of each head": ("rotary_percent",),
    "positions that turn neighbouring numbers": ("rotary_interleaved",),
    "layers without positions": ("no_rope_freq", "nope_layer_interval"),
    "a stretch of positions that is not known": ("rope_scaling",),
}
"""The same of models with rotary positions; other models do not look at these."""
_NOTHING = {
    "softmax_type": ("vanilla",),
    "scaling_recipe": ("none",),
    "rotary_percent": (1.0,),
    **dict.fromkeys(_REFUSED["layers of several experts"], (1,)),
}
"""Values that ask for nothing, beside empty ones."""
_ENUM = {1: "rotary", 2: "absolute", 3: "alibi"}
"""BigScience's and BigCode's PositionEmbeddingType."""
_POSITIONS = {
    **dict.fromkeys(("rotary", "rope"), "rotary"),
    **dict.fromkeys(("None", "learned", "absolute", "learned_absolute"), "learned"),
    "alibi": "alibi",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Megatron-LM's rope scaling, of which its arguments tell the factor alone."""


def first(args: Any, *names: str) -> Any:
    """The first argument of some that is there and not None."""
    return next((value for name in names if (value := getattr(args, name, None)) is not None), None)


def function_of(args: Any, file: Path, *, gated: bool, is_core: bool) -> dict[str, Any]:
    """Settings of an `Architecture` that say its function, not its shape.

    Args:
        args: of the checkpoint.
        file: that they are in, for messages.
        gated: whether the MLP is.
        is_core: whether the model is megatron.core's, which takes some arguments otherwise.

    Raises:
        UserError: no family of ours has such a model; the message names the argument.
    """
    _refuse(args, file, _REFUSED)
    found: dict[str, Any] = {"position_embedding": _positions(args, file)}
    if found["position_embedding"] == "rotary":
        _refuse(args, file, _REFUSED_IF_ROTARY)
        found |= _rotary(args, file)
    _check_norm(args, file, gated=gated)
    names = ("layernorm_epsilon", "norm_epsilon")  # the second is what megatron.core looks at
    epsilon = first(args, *(reversed(names) if is_core else names))
    found["rms_norm_eps" if gated else "layer_norm_epsilon"] = 1e-5 if epsilon is None else epsilon
    biased = getattr(args, "add_bias_linear", None)
    biased = not gated if biased is None else bool(biased)
    if getattr(args, "add_qkv_bias", False) and not biased:
        raise _unlike(args, file, "add_qkv_bias", "biases of queries, keys and values alone")
    found |= {"attention_bias": biased, "mlp_bias": biased}
    if not gated:
        found["embedding_layernorm"] = bool(getattr(args, "embed_layernorm", False))
        found["hidden_act"] = _activation(args, file, biased=biased, is_core=is_core)
    return found


def _refuse(args: Any, file: Path, refused: dict[str, tuple[str, ...]]) -> None:
    for meaning, names in refused.items():
        for name in names:
            if any(each not in _NOTHING.get(name, ()) for each in _asked(args, name)):
                raise _unlike(args, file, name, meaning)


def _asked(args: Any, name: str) -> Iterable[Any]:
    """Values of an argument that are not empty; of several experts, some have a list."""
    value = getattr(args, name, None)
    several = value if isinstance(value, list | tuple) else (value,)
    return [each for each in several if each]


def _unlike(args: Any, file: Path, name: str, meaning: str) -> UserError:
    value = reprlib.repr(getattr(args, name, None))
    return UserError(
        f"{file}: args.{name}: {value}: means {meaning}, which no family of tokamake has; give a "
        "checkpoint of a model without"
    )


def _positions(args: Any, file: Path) -> str:
    kind = getattr(args, "position_embedding_type", None)
    if isinstance(kind, StandIn) and kind.name.endswith("PositionEmbeddingType"):
        number = kind.arguments[0] if kind.arguments else None
        kind = _ENUM.get(number, "") if isinstance(number, int) else ""
    name = str(kind).rpartition(".")[2]
    found = _POSITIONS.get(name)
    if getattr(args, "use_rotary_position_embeddings", False) and found in ("learned", "rotary"):
        return "rotary"
    if found is None:
        raise UserError(
            f"{file}: args.position_embedding_type: {name!r}: no family of tokamake has such "
            "positions; give a checkpoint of a model with rope, learned_absolute or alibi"
        )
    if found == "learned" and getattr(args, "add_position_embedding", None) is False:
        raise _unlike(args, file, "add_position_embedding", "a model without positions")
    return found


def _rotary(args: Any, file: Path) -> dict[str, Any]:
    """Base and stretch of rotary positions."""
    bases = {name: getattr(args, name, None) for name in ("rope_theta", "rotary_base")}
    given = {name: value for name, value in bases.items() if value is not None}
    if any(value != other for value in given.values() for other in given.values()):
        told = " and ".join(f"args.{name}: {value!r}" for name, value in given.items())
        raise UserError(
            f"{file}: {told} contradict each other; take out the one that was not trained with"
        )
    found: dict[str, Any] = {"rope_theta": next(iter(given.values()), 10000.0)}
    stretch = getattr(args, "rotary_seq_len_interpolation_factor", None)
    if getattr(args, "use_rope_scaling", False):
        if stretch not in (None, 1):
            raise UserError(
                f"{file}: args.rotary_seq_len_interpolation_factor: {stretch!r}: together with "
                "use_rope_scaling, which no family of tokamake has; give a checkpoint with one"
            )
        factor = first(args, "rope_scaling_factor")
        found["rope_scaling"] = {**_LLAMA3, "factor": 8.0 if factor is None else factor}
    elif stretch not in (None, 1):
        found["rope_scaling"] = {"rope_type": "linear", "factor": stretch}
    return found


def _check_norm(args: Any, file: Path, *, gated: bool) -> None:
    """See that the norm is the family's: RMSNorm with a gated MLP, LayerNorm with others."""
    norm = getattr(args, "normalization", None)
    wanted = "rmsnorm" if gated else "layernorm"
    if norm is not None and str(norm).lower() != wanted:
        raise UserError(
            f"{file}: args.normalization: {norm!r}: beside an MLP "
            f"{'with' if gated else 'without'} swiglu no family of tokamake has it; give a "
            f"checkpoint of a model with {wanted}"
        )


def _activation(args: Any, file: Path, *, biased: bool, is_core: bool) -> str:
    """Megatron's gelu is by tanh where it is fused with the bias, else the exact one."""
    fused = getattr(args, "bias_gelu_fusion", None)
    if biased and (fused is None or fused):
        if getattr(args, "onnx_safe", False) and not is_core:
            raise UserError(
                f"{file}: args.onnx_safe: {args.onnx_safe!r}: with bias_gelu_fusion, Megatrons "
                "differ in which gelu that is; take out the one that did not count"
            )
        return "gelu_new"
    by_tanh = getattr(args, "openai_gelu", False) and not is_core
    return "gelu_new" if by_tanh else "gelu"


def described(shape: Architecture) -> dict[str, Any]:
    """Megatron's arguments of a model's function, as Megatron-LM and Megatron-DeepSpeed call them.

    Args:
        shape: of the model.
    """
    by_tanh = shape.hidden_act in ("gelu_new", "gelu_pytorch_tanh")
    return {
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "bias_gelu_fusion": by_tanh and shape.mlp_bias,
        "openai_gelu": by_tanh and not shape.mlp_bias,  # Megatron refuses both
        "onnx_safe": False,
        "squared_relu": False,
        "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        **_scaling(shape),
    }


def _scaling(shape: Architecture) -> dict[str, Any]:
    """Megatron-LM's arguments of a stretch of positions, where it has them."""
    found = {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}
    scaling = shape.rope_scaling
    if scaling is None:
        return found
    if scaling.rope_type == "linear":
        return found | {"rotary_seq_len_interpolation_factor": scaling.factor}
    given = scaling.model_dump(exclude_none=True)
    if given == {**_LLAMA3, "factor": scaling.factor}:
        return found | {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    return found


def untold(shape: Architecture, title: str) -> list[str]:
    """Settings of a model that Megatron's arguments have no word for, so that it would not know.

    Args:
        shape: of the model.
        title: Megatron-LM or Megatron-DeepSpeed, whose arguments are meant.
    """
    found, scaling, of_megatron_lm = [], shape.rope_scaling, title == "Megatron-LM"
    said = any(value for value in _scaling(shape).values())
    if scaling is not None and not (of_megatron_lm and said):
        found.append(f"rope_scaling {scaling.rope_type}")
    if shape.hidden_act == "relu":
        found.append("hidden_act relu")
    if of_megatron_lm and "gelu_" in shape.hidden_act and not shape.mlp_bias:
        found.append(f"hidden_act {shape.hidden_act} without biases")
    if shape.attention_bias != shape.mlp_bias:
        found.append(f"attention_bias {shape.attention_bias} with mlp_bias {shape.mlp_bias}")
    if of_megatron_lm and shape.position_embedding == "alibi":
        found.append("position_embedding alibi")
    if of_megatron_lm and shape.embedding_layernorm:
        found.append("embedding_layernorm")
    return found
