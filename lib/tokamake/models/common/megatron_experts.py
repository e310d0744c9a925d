"""Mixtures of experts in Megatron's terms: all that the megatron.py of such a family needs.

Names are megatron.core's: its classic files number the experts of a rank, and its distributed
checkpoints stack all experts of a layer. An architecture lacks some of the modules here, and a
family some of the settings.
"""

import reprlib
from pathlib import Path
from typing import Any

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.families import FAMILIES
from tokamake.errors import UserError
from tokamake.models.common.megatron_format import (
    ATTENTION,
    GATED_MLP,
    INPUT_NORM,
    MLP_NORM,
    MegatronModule,
    first,
    norm_epsilon,
    rms_norm_arguments,
    unsupported,
)
from tokamake.models.common.megatron_latent import (
    LATENT_ATTENTION,
    inexpressible_latent,
    latent_arguments,
    latent_fields,
)

_QKV, _OUTPUT = ATTENTION
# In the order in which megatron.core makes them with Transformer Engine; optimizers keep it.
_ATTENTION = (
    MegatronModule("self_attention.core_attention", ("self_attn",), "rows"),  # has sinks
    _OUTPUT,
    INPUT_NORM,
    _QKV,
    MegatronModule("self_attention.q_layernorm", ("self_attn.q_norm",)),
    MegatronModule("self_attention.k_layernorm", ("self_attn.k_norm",)),
)
_DENSE_MLP = (MLP_NORM, *GATED_MLP)


def _gated(theirs: str, ours: str) -> tuple[MegatronModule, MegatronModule]:
    inner = (f"{ours}.gate_proj", f"{ours}.up_proj")
    return (
        MegatronModule(f"{theirs}.linear_fc1", inner, "rows"),
        MegatronModule(f"{theirs}.linear_fc2", (f"{ours}.down_proj",), "columns"),
    )


_EXPERTS = (
    # No projection follows the norm, so Transformer Engine fuses it with none.
    MegatronModule("pre_mlp_layernorm", MLP_NORM.ours),
    MegatronModule("mlp.router", ("mlp.gate",)),
    *_gated("mlp.experts.local_experts.{}", "mlp.experts"),
    *_gated("mlp.shared_experts", "mlp.shared_experts"),
)
_BEFORE_MTP = (
    MegatronModule("enorm", ("enorm",)),
    MegatronModule("hnorm", ("hnorm",)),
    MegatronModule("eh_proj", ("eh_proj",), "rows"),
)
_AFTER_MTP = MegatronModule("final_layernorm", ("shared_head.norm",))


def expert_layer(architecture: Architecture, number: int) -> tuple[MegatronModule, ...]:
    """Modules of a layer, in Megatron's order."""
    attention = LATENT_ATTENTION if architecture.latent_size else _ATTENTION
    has_experts = number in architecture.expert_layers
    layer = (*attention, *(_EXPERTS if has_experts else _DENSE_MLP))
    if number not in architecture.mtp_layers:
        return layer
    within = (each._replace(name=f"transformer_layer.{each.name}") for each in layer)
    return (*_BEFORE_MTP, *within, _AFTER_MTP)


_NUMBER, _CHOSEN, _WIDTH = "num_experts", "moe_router_topk", "moe_ffn_hidden_size"
_IS_RAW, _BALANCE = "moe_router_pre_softmax", "moe_router_load_balancing_type"
_FREQUENCY, _SHARED = "moe_layer_freq", "moe_shared_expert_intermediate_size"
_GROUPS, _CHOSEN_GROUPS = "moe_router_num_groups", "moe_router_group_topk"
_SCALE, _SCORE = "moe_router_topk_scaling_factor", "moe_router_score_function"
_HAS_BIAS, _MTP = "moe_router_enable_expert_bias", "mtp_num_layers"
_CLAMP, _OFFSET = "activation_func_clamp_value", "glu_linear_offset"
_ALPHA = 1.702
"""Factor in the sigmoid of Megatron's quick GELU."""
_UNUSED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    _SHARED: ((), "an MLP that all tokens share", "n_shared_experts"),
    _CHOSEN_GROUPS: ((), "routers that choose groups of experts first", "n_group"),
    _SCALE: ((1.0,), "scaled results of experts", "routed_scaling_factor"),
    "moe_router_topk_limited_devices": ((), "routers that choose groups of experts first", ""),
    "moe_router_force_load_balancing": ((), "routers that choose experts at random", ""),
    "moe_apply_probs_on_input": ((), "experts whose inputs are weighted", ""),
    "moe_latent_size": ((), "experts of a narrower state", ""),
    "moe_input_jitter_eps": ((), "noise in the inputs of routers", ""),
    "moe_extended_tp": ((), "experts that all ranks divide", ""),
    "moe_shared_expert_gate": ((), "a gate of the MLP that all tokens share", ""),
}
"""Arguments whose values other than these and empty ones give another model, what they mean, and
the setting of families that have it."""
_UNBALANCED = {
    _SCORE: (("softmax",), "routers whose scores are no softmax", ""),
    _HAS_BIAS: ((), "routers with a bias that balances experts", ""),
}
"""The same for families whose routers have no such bias."""


def expert_fields(args: Any, file: Path, *, is_core: bool, family: str) -> dict[str, Any]:
    """`fields` of a family with RMSNorms and experts."""
    settings = plugins.constant(FAMILIES, family, "SETTINGS")
    balanced = plugins.constant(FAMILIES, family, "HAS_ROUTER_BIASES", default=False)
    _refuse(args, file, settings=settings, balanced=balanced, family=family)
    chosen = first(args, _CHOSEN)
    chosen = 2 if chosen is None else chosen
    width = first(args, _WIDTH, "ffn_hidden_size")
    has_biases = bool(getattr(args, "add_bias_linear", False))
    optional = {
        "moe_intermediate_size": width,
        "qkv_bias": bool(getattr(args, "add_qkv_bias", False)),
        "use_qk_norm": bool(getattr(args, "qk_layernorm", False)),
        "partial_rotary_factor": float(first(args, "rotary_percent") or 1.0),
        "routed_scaling_factor": float(first(args, _SCALE) or 1.0),
        "num_nextn_predict_layers": first(args, _MTP) or 0,
        "attention_sinks": True,
    }
    fields = {
        "rms_norm_eps": norm_epsilon(args, is_core=is_core),
        "attention_bias": has_biases,
        "mlp_bias": has_biases,
        "num_experts": getattr(args, _NUMBER),
        "num_experts_per_tok": chosen,
        **{name: value for name, value in optional.items() if name in settings},
        **_weights(
            *(args, file),
            settings=settings,
            renormalizes=chosen > 1 if balanced else None,
            family=family,
        ),
    }
    if "moe_intermediate_size" not in settings:
        fields["intermediate_size"] = width
    if "qkv_bias" not in settings and getattr(args, "add_qkv_bias", False) and not has_biases:
        meaning = "biases of queries, keys and values alone"
        raise unsupported(args, file, name="add_qkv_bias", meaning=meaning, family=family)
    num_dense = _num_dense(args, file, settings=settings, family=family)
    if "n_shared_experts" in settings:
        groups = _groups(args, file, chosen=chosen, best=2 if balanced else 1, family=family)
        shared = _num_shared(args, file, width=width, family=family)
        fields |= {"first_k_dense_replace": num_dense, "n_shared_experts": shared, **groups}
    fields |= latent_fields(args, file, family=family) if "kv_lora_rank" in settings else {}
    return fields | (_clamps(args, file, family=family) if "swiglu_limit" in settings else {})


def _refuse(
    args: Any, file: Path, *, settings: dict[str, Any], balanced: bool, family: str
) -> None:
    for name, (usual, meaning, setting) in (_UNUSED if balanced else _UNUSED | _UNBALANCED).items():
        value = getattr(args, name, None) or None
        values = value if isinstance(value, list | tuple) else [value]
        if setting not in settings and any(each not in (*usual, None) for each in values):
            raise unsupported(args, file, name=name, meaning=meaning, family=family)
    if (first(args, "moe_expert_capacity_factor") or -1) >= 0:
        name, meaning = "moe_expert_capacity_factor", "experts that drop tokens"
        raise unsupported(args, file, name=name, meaning=meaning, family=family)
    if "sinkhorn" in (getattr(args, _BALANCE, None) or ()):
        meaning = "routers that choose by Sinkhorn"
        raise unsupported(args, file, name=_BALANCE, meaning=meaning, family=family)


def _weights(
    args: Any, file: Path, *, settings: dict[str, Any], renormalizes: bool | None, family: str
) -> dict[str, Any]:
    """norm_topk_prob; None: an argument states it. Megatron scales sigmoids of several experts."""
    is_scaled = not getattr(args, _IS_RAW, False) if renormalizes is None else renormalizes
    choices = settings.get("norm_topk_prob", (False,))
    if is_scaled not in choices:
        kind = "raw probabilities" if choices == (True,) else "numbers that add up to 1"
        meaning = f"{kind} as weights of experts"
        raise unsupported(args, file, name=_IS_RAW, meaning=meaning, family=family)
    return {"norm_topk_prob": is_scaled} if "norm_topk_prob" in settings else {}


def _num_dense(args: Any, file: Path, *, settings: dict[str, Any], family: str) -> int:
    """The number of layers before those with experts."""
    stated, num_layers = first(args, _FREQUENCY) or 1, args.num_layers
    if stated == 1:
        return 0
    if not isinstance(stated, list | tuple):
        meaning = f"experts in one of {stated} layers alone"
        raise unsupported(args, file, name=_FREQUENCY, meaning=meaning, family=family)
    argument = f"{file}: args.{_FREQUENCY}: {reprlib.repr(stated)}"
    if len(stated) != num_layers:
        raise UserError(
            f"{argument}: {len(stated)} numbers, but args.num_layers is {num_layers}; correct the "
            "one that is wrong"
        )
    if not any(stated):
        raise UserError(
            f"{argument}: no layer has experts, but args.{_NUMBER} is {getattr(args, _NUMBER)}; "
            "correct the one that is wrong"
        )
    number = next(index for index, has_experts in enumerate(stated) if has_experts)
    if [*stated] != [0] * number + [1] * (num_layers - number):
        meaning = "layers without experts after layers with experts"
    elif number and "first_k_dense_replace" not in settings:
        meaning = "layers without experts"
    else:
        return number
    raise unsupported(args, file, name=_FREQUENCY, meaning=meaning, family=family)


def _num_shared(args: Any, file: Path, *, width: int, family: str) -> int:
    """The number of experts that all tokens share."""
    size: int = first(args, _SHARED) or 0
    if size % width:
        meaning = f"an MLP that all tokens share, whose width is no multiple of an expert's {width}"
        raise unsupported(args, file, name=_SHARED, meaning=meaning, family=family)
    return size // width


def _groups(args: Any, file: Path, *, chosen: int, best: int, family: str) -> dict[str, Any]:
    """n_group and topk_group: the score of a group here is the sum of its `best` experts."""
    if not (kept := first(args, _CHOSEN_GROUPS)):
        return {"n_group": 1, "topk_group": 1}
    if chosen // kept != best:
        meaning = f"groups whose score is the sum of {chosen // kept} experts, here {best}"
        raise unsupported(args, file, name=_CHOSEN_GROUPS, meaning=meaning, family=family)
    return {"n_group": getattr(args, _GROUPS), "topk_group": kept}


def _clamps(args: Any, file: Path, *, family: str) -> dict[str, Any]:
    """swiglu_alpha and swiglu_limit."""
    if (offset := first(args, _OFFSET)) != 1:
        meaning = f"up projections plus {offset or 0} instead of plus 1"
        raise unsupported(args, file, name=_OFFSET, meaning=meaning, family=family)
    if (limit := first(args, _CLAMP)) is None:
        meaning = "gates without a limit"
        raise unsupported(args, file, name=_CLAMP, meaning=meaning, family=family)
    return {"swiglu_alpha": _ALPHA, "swiglu_limit": float(limit)}


def expert_arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of RMSNorms and experts; the inverse of `expert_fields`."""
    own, balanced = architecture.model_extra or {}, architecture.has_router_biases
    layers, num_dense = architecture.num_hidden_layers, architecture.expert_layers.start
    width = architecture.expert_size
    arguments = {
        **rms_norm_arguments(architecture),
        _NUMBER: own["num_experts"],
        _CHOSEN: own["num_experts_per_tok"],
        _WIDTH: width,
        _IS_RAW: not balanced and not own.get("norm_topk_prob", False),
        _FREQUENCY: [0] * num_dense + [1] * (layers - num_dense) if num_dense else 1,
        _SCORE: "sigmoid" if balanced else "softmax",
        "add_qkv_bias": own.get("qkv_bias", False),
        "rotary_percent": own.get("partial_rotary_factor", 1.0),
    }
    if balanced:
        arguments |= {_MTP: architecture.num_mtp_layers or None, "moe_router_dtype": "fp32"}
    if "n_shared_experts" in own:
        has_groups = own["n_group"] > 1
        arguments |= {
            _SHARED: own["n_shared_experts"] * width or None,
            _SCALE: own["routed_scaling_factor"],
            _GROUPS: own["n_group"] if has_groups else None,
            _CHOSEN_GROUPS: own["topk_group"] if has_groups else None,
        }
    if "use_qk_norm" in own:
        arguments["qk_layernorm"] = own["use_qk_norm"]
    if "swiglu_limit" in own:
        arguments |= {_CLAMP: own["swiglu_limit"], _OFFSET: 1.0}
    return arguments | (latent_arguments(architecture) if architecture.latent_size else {})


def inexpressible_experts(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings of experts and latent attention without an argument of Megatron-LM."""
    own, balanced = architecture.model_extra or {}, architecture.has_router_biases
    chosen, renormalizes = own["num_experts_per_tok"], own.get("norm_topk_prob", False)
    settings = []
    if chosen == 1 and renormalizes:
        settings.append("norm_topk_prob of a single expert")
    if balanced and chosen > 1 and not renormalizes:
        settings.append("norm_topk_prob False with sigmoids")
    if own.get("n_group", 1) > 1 and chosen // own["topk_group"] != (2 if balanced else 1):
        settings.append(f"topk_group {own['topk_group']} with num_experts_per_tok {chosen}")
    if (alpha := own.get("swiglu_alpha", _ALPHA)) != _ALPHA:
        settings.append(f"swiglu_alpha {alpha:g}")
    return settings + (inexpressible_latent(architecture) if architecture.latent_size else [])
