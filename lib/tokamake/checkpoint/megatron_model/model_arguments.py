"""Architecture fields that tensor shapes do not determine, read from Megatron's arguments.

Each argument becomes a field of our architecture or is refused: a model that computes something
else with the same weights would be silently wrong. Arguments that add tensors are refused, too.
"""

import fnmatch
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from tokamake import plugins
from tokamake.checkpoint.torch_files.allowed_globals import StandIn
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.models.common.megatron_format import first, unsupported
from tokamake.models.common.megatron_latent import latent_scaling
from tokamake.models.common.megatron_windows import (
    WINDOW_ARGUMENTS,
    has_windows,
    window_arguments,
    window_fields,
)

KIND = "models/*/megatron"

_REFUSED = {
    "experts": (*("num_experts", "ds_num_experts", "num_experts_switch", "num_moe_experts"),),
    "zero-centered norm weights (1 + w)": ("apply_layernorm_1p", "layernorm_zero_centered_gamma"),
    "norms at other places in a layer": (
        *("apply_residual_connection_post_layernorm", "use_post_ln", "parallel_layernorm"),
    ),
    "attention and MLP side by side": ("parallel_attn", "parallel_attention_mlp"),
    "norms of queries and keys": ("qk_layernorm", "qk_l2_norm"),
    "latent attention": ("multi_latent_attention",),
    "attention to a window": (*WINDOW_ARGUMENTS, "sliding_window"),
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
"""Features that most families lack, and the arguments that ask for them if they are not empty."""
_REFUSED_IF_ROTARY = {
    "rotary positions of a part of each head": ("rotary_percent",),
    "interleaved rotary positions": ("rotary_interleaved",),
    "layers without positions": ("no_rope_freq", "nope_layer_interval"),
    "a scaling of rotary positions that is not known": ("rope_scaling",),
}
"""The same for models with rotary positions; other models ignore these arguments."""
_NOTHING = {
    "softmax_type": ("vanilla",),
    "scaling_recipe": ("none",),
    "rotary_percent": (1.0,),
    **dict.fromkeys(_REFUSED["experts"], (1,)),
}
"""Values that leave a feature off, besides empty ones."""
_ENUM = {1: "rotary", 2: "absolute", 3: "alibi"}
"""PositionEmbeddingType of BigScience and BigCode."""
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
"""Rope scaling of Megatron-LM, whose arguments state the factor alone."""


def family_of(args: Any, file: Path, *, names: Collection[str] = ()) -> str:
    """Family whose `TENSORS` and `ARGUMENTS` a checkpoint has; if several do, the longest match."""
    tensors = {
        name: getattr(plugins.load(KIND, name), "TENSORS", ()) for name in plugins.names(KIND)
    }
    families = {
        name: plugins.load(KIND, name).ARGUMENTS
        for name, patterns in tensors.items()
        if all(fnmatch.filter(names, pattern) for pattern in patterns)
    }
    matches = {
        name: [_matches(args, argument, value=value) for argument, value in arguments.items()]
        for name, arguments in families.items()
    }
    matching = [name for name, each in matches.items() if all(each)]
    if matching:
        # Several families have windows: another argument tells them apart.
        further = {name: len({*families[name]} - {*WINDOW_ARGUMENTS}) for name in matching}
        return max(matching, key=lambda n: (len(tensors[n]), further[n], len(families[n])))
    # Lists begin with the most distinctive argument: the nearest family differs in few, late ones.
    nearest = families[max(matches, key=lambda name: (-matches[name].count(False), matches[name]))]
    argument = next(
        name for name, value in nearest.items() if not _matches(args, name, value=value)
    )
    rest = " and ".join(f"{name} {value}" for name, value in nearest.items() if name != argument)
    raise UserError(
        f"{file}: args.{argument}: {getattr(args, argument, None)!r}: no family of tokamake "
        f"combines this with {rest}; give a checkpoint of a model with {nearest[argument]}"
    )


def _matches(args: Any, name: str, *, value: Any) -> bool:
    if isinstance(value, str):
        return str(first(args, name) or value).lower() == value
    return any(_asked(args, name)) == value


def architecture_fields(
    args: Any, file: Path, *, family: str, is_core: bool, names: Collection[str]
) -> dict[str, Any]:
    """Fields of an `Architecture` that the shapes of its tensors do not show.

    `names` are tensors of the last stage.
    """
    plug_in = plugins.load(KIND, family)
    known = {*plug_in.ARGUMENTS, *getattr(plug_in, "READ", ())}
    known |= {*WINDOW_ARGUMENTS} if has_windows(family) else set()
    _refuse(args, file, refused=_REFUSED, known=known, family=family)
    fields: dict[str, Any] = {"position_embedding": _positions(args, file)}
    if fields["position_embedding"] == "rotary":
        _refuse(args, file, refused=_REFUSED_IF_ROTARY, known=known, family=family)
        fields |= _rotary(args, file)
    if has_windows(family):
        fields |= window_fields(args, file, family=family)
    fields |= plug_in.fields(args, file, is_core=is_core)
    if hasattr(plug_in, "fields_of_tensors"):
        fields |= plug_in.fields_of_tensors(names)
    return fields


def _refuse(
    args: Any,
    file: Path,
    *,
    refused: dict[str, tuple[str, ...]],
    known: Iterable[str],
    family: str,
) -> None:
    for meaning, names in refused.items():
        for name in names:
            if name not in known and _asked(args, name):
                raise unsupported(args, file, name=name, meaning=meaning, family=family)


def _asked(args: Any, name: str) -> list[Any]:
    """Values of an argument that ask for something; `num_experts` may be a list."""
    value = getattr(args, name, None)
    values = value if isinstance(value, list | tuple) else (value,)
    return [each for each in values if each and each not in _NOTHING.get(name, ())]


def _positions(args: Any, file: Path) -> str:
    kind = getattr(args, "position_embedding_type", None)
    if isinstance(kind, StandIn) and kind.name.endswith("PositionEmbeddingType"):
        number = kind.arguments[0] if kind.arguments else None
        kind = _ENUM.get(number, "") if isinstance(number, int) else ""
    name = str(kind).rpartition(".")[2]
    positions = _POSITIONS.get(name)
    # Megatron-DeepSpeed states rotary positions by this flag beside the type.
    is_rotary = getattr(args, "use_rotary_position_embeddings", False)
    if is_rotary and positions in ("learned", "rotary"):
        return "rotary"
    if positions is None:
        raise UserError(
            f"{file}: args.position_embedding_type: {name!r}: no family of tokamake has such "
            "positions; give a checkpoint of a model with rope, learned_absolute or alibi"
        )
    if positions == "learned" and getattr(args, "add_position_embedding", None) is False:
        raise unsupported(
            args, file, name="add_position_embedding", meaning="a model without positions"
        )
    return positions


def _rotary(args: Any, file: Path) -> dict[str, Any]:
    stated = {name: getattr(args, name, None) for name in ("rope_theta", "rotary_base")}
    bases = {name: value for name, value in stated.items() if value is not None}
    if any(value != other for value in bases.values() for other in bases.values()):
        listed = " and ".join(f"args.{name}: {value!r}" for name, value in bases.items())
        raise UserError(
            f"{file}: {listed} contradict each other; remove the one that the training did not use"
        )
    fields: dict[str, Any] = {"rope_theta": next(iter(bases.values()), 10000.0)}
    interpolation = getattr(args, "rotary_seq_len_interpolation_factor", None)
    if getattr(args, "use_rope_scaling", False):
        if interpolation not in (None, 1):
            raise UserError(
                f"{file}: args.rotary_seq_len_interpolation_factor: {interpolation!r}: no family "
                "of tokamake combines it with use_rope_scaling; give a checkpoint that has only "
                "one of them"
            )
        factor = first(args, "rope_scaling_factor")
        fields["rope_scaling"] = {**_LLAMA3, "factor": 8.0 if factor is None else factor}
    elif interpolation not in (None, 1):
        fields["rope_scaling"] = {"rope_type": "linear", "factor": interpolation}
    return fields


def arguments_of(architecture: Architecture) -> dict[str, Any]:
    """Arguments that all families write: features are off; a family's arguments override them."""
    return {
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "bias_gelu_fusion": False,
        "openai_gelu": False,
        "onnx_safe": False,
        "squared_relu": False,
        "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        **_scaling(architecture),
        **window_arguments(architecture),
    }


def _scaling(architecture: Architecture) -> dict[str, Any]:
    """Megatron-LM's arguments of rope scaling, empty if it has none for this scaling."""
    arguments = {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}
    scaling = architecture.rope_scaling
    if scaling is None:
        return arguments
    if scaling.rope_type == "linear":
        return arguments | {"rotary_seq_len_interpolation_factor": scaling.factor}
    if scaling.model_dump(exclude_none=True) == {**_LLAMA3, "factor": scaling.factor}:
        return arguments | {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    return arguments


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings for which Megatron-LM or Megatron-DeepSpeed has no argument."""
    settings, scaling = [], architecture.rope_scaling
    is_latent = architecture.latent_size
    stated = latent_scaling(architecture) if is_latent else _scaling(architecture)
    if scaling is not None and not (is_megatron_lm and any(stated.values())):
        settings.append(f"rope_scaling {scaling.rope_type}")
    if (attention := architecture.attention_bias) != architecture.mlp_bias:
        settings.append(f"attention_bias {attention} with mlp_bias {architecture.mlp_bias}")
    if not is_megatron_lm and window_arguments(architecture):
        settings.append("attention to a window")
    plug_in = plugins.load(KIND, architecture.family)
    return settings + plug_in.inexpressible(architecture, is_megatron_lm=is_megatron_lm)
