"""Mixtures of experts in Megatron's terms, for the megatron.py of families with experts.

Names are megatron.core's: its classic files number the experts of a rank, and its distributed
checkpoints stack all experts of all layers.
"""

from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    MegatronModule,
    first,
    rms_norm_arguments,
    rms_norm_fields,
    unsupported,
)

_EXPERT = "mlp.experts.local_experts.{}"
EXPERTS = (
    MegatronModule("mlp.router", ("mlp.gate",)),
    MegatronModule(
        f"{_EXPERT}.linear_fc1", ("mlp.experts.gate_proj", "mlp.experts.up_proj"), "rows"
    ),
    MegatronModule(f"{_EXPERT}.linear_fc2", ("mlp.experts.down_proj",), "columns"),
)
"""A router and its experts, in place of an MLP."""
EXPERT_NAMES = ((r"\bpost_attention_layernorm\.", "pre_mlp_layernorm."),)
"""`CORE_NAMES`: no projection follows the norm, so Transformer Engine fuses it with none."""
STACKED_EXPERTS = ((r"\.local_experts\.(\d+)\.", ".experts."),)
"""`SHARDED_STACKS` of experts."""
EXPERT_STATES = (
    *("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm"),
)
"""`EXTRA_STATES` of a layer besides the experts' own."""

NORM_KEYS = {
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": "decoder.layers.pre_mlp_layernorm.weight"
}
"""`SECOND_KEYS`: layers without Transformer Engine name the norm as if an MLP followed."""

_NUMBER, _CHOSEN, _WIDTH = "num_experts", "moe_router_topk", "moe_ffn_hidden_size"
_IS_RAW, _BALANCE = "moe_router_pre_softmax", "moe_router_load_balancing_type"
_UNUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "moe_layer_freq": ((1,), "layers with experts among layers without"),
    "moe_shared_expert_intermediate_size": ((), "an MLP that all tokens share"),
    "moe_router_score_function": (("softmax",), "routers whose scores are no softmax"),
    "moe_router_group_topk": ((), "routers that choose groups of experts first"),
    "moe_router_topk_limited_devices": ((), "routers that choose groups of experts first"),
    "moe_router_enable_expert_bias": ((), "routers with a bias that balances experts"),
    "moe_router_topk_scaling_factor": ((1.0,), "scaled results of experts"),
    "moe_router_force_load_balancing": ((), "routers that choose experts at random"),
    "moe_apply_probs_on_input": ((), "experts whose inputs are weighted"),
    "moe_latent_size": ((), "experts of a narrower state"),
    "moe_input_jitter_eps": ((), "noise in the inputs of routers"),
    "moe_extended_tp": ((), "experts that all ranks divide"),
}
"""Arguments whose values other than these and empty ones give another model, and what they mean."""


def expert_fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """`fields` of a family with RMSNorms and experts; the width of an expert is `expert_size`."""
    for name, (usual, meaning) in _UNUSED.items():
        value = getattr(args, name, None) or None
        values = value if isinstance(value, list | tuple) else [value]
        if any(each not in (*usual, None) for each in values):
            raise unsupported(args, file, name=name, meaning=meaning)
    if (first(args, "moe_expert_capacity_factor") or -1) >= 0:
        meaning = "experts that drop tokens"
        raise unsupported(args, file, name="moe_expert_capacity_factor", meaning=meaning)
    if "sinkhorn" in (getattr(args, _BALANCE, None) or ()):
        raise unsupported(args, file, name=_BALANCE, meaning="routers that choose by Sinkhorn")
    chosen = first(args, _CHOSEN)
    return {
        **rms_norm_fields(args, file, is_core=is_core),
        "num_experts": getattr(args, _NUMBER),
        "num_experts_per_tok": 2 if chosen is None else chosen,
        "norm_topk_prob": not getattr(args, _IS_RAW, False),
        "expert_size": first(args, _WIDTH, "ffn_hidden_size"),
    }


def expert_arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of RMSNorms and experts; the inverse of `expert_fields`."""
    return {
        **rms_norm_arguments(architecture),
        _NUMBER: architecture.setting("num_experts"),
        _CHOSEN: architecture.setting("num_experts_per_tok"),
        _WIDTH: architecture.expert_size,
        _IS_RAW: not architecture.setting("norm_topk_prob"),
        "moe_layer_freq": 1,
        "moe_router_score_function": "softmax",
    }


def inexpressible_experts(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    """Settings of experts without an argument: Megatron-LM refuses a softmax of one score."""
    is_constant = architecture.setting("num_experts_per_tok") == 1
    return ["norm_topk_prob of a single expert"] * (
        is_constant and architecture.setting("norm_topk_prob")
    )
