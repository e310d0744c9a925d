"""A `mixture` in Megatron's terms."""

from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    ATTENTION,
    INPUT_NORM,
    MLP_NORM,
    MegatronModule,
    rms_norm_fields,
)

ARGUMENTS = {"swiglu": True, "normalization": "rmsnorm", "num_experts": True}

LAYER = (
    INPUT_NORM,
    *ATTENTION,
    MLP_NORM,
    MegatronModule("mlp.router", ("mlp.gate",)),
    MegatronModule(
        "mlp.experts.local_experts.{}.linear_fc1",
        ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
        "rows",
    ),
    MegatronModule(
        "mlp.experts.local_experts.{}.linear_fc2", ("mlp.experts.down_proj",), "columns"
    ),
)

CORE_NAMES = ((r"\bpost_attention_layernorm\.", "pre_mlp_layernorm."),)


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    return {
        **rms_norm_fields(args, file, is_core=is_core),
        "num_experts": args.num_experts,
        "expert_size": args.moe_ffn_hidden_size,
    }


def arguments(architecture: Architecture) -> dict[str, Any]:
    return {
        "layernorm_epsilon": architecture.rms_norm_eps,
        "num_experts": architecture.setting("num_experts"),
        "moe_ffn_hidden_size": architecture.setting("expert_size"),
    }


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    return []
