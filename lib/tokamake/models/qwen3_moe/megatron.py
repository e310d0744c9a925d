"""A `qwen3_moe` in Megatron-LM's terms: modules of a layer, arguments of its function."""

from pathlib import Path
from typing import Any

from tokamake.models.common.megatron_experts import (
    EXPERT_NAMES,
    EXPERT_STATES,
    EXPERTS,
    NORM_KEYS,
    STACKED_EXPERTS,
    expert_arguments,
    expert_fields,
    inexpressible_experts,
)
from tokamake.models.common.megatron_format import (
    ATTENTION,
    INPUT_NORM,
    MLP_NORM,
    MegatronModule,
)

ARGUMENTS = {
    "swiglu": True,
    "num_experts": True,
    "qk_layernorm": True,
    "normalization": "rmsnorm",
}

IS_CORE = True

_QKV, _OUTPUT = ATTENTION
# In the order in which megatron.core makes them; optimizers keep it.
LAYER = (
    _OUTPUT,
    INPUT_NORM,
    _QKV,
    MegatronModule("self_attention.q_layernorm", ("self_attn.q_norm",)),
    MegatronModule("self_attention.k_layernorm", ("self_attn.k_norm",)),
    MLP_NORM,
    *EXPERTS,
)

CORE_NAMES = EXPERT_NAMES
SHARDED_STACKS = STACKED_EXPERTS
EXTRA_STATES = EXPERT_STATES
SECOND_KEYS = NORM_KEYS


def fields(args: Any, file: Path, *, is_core: bool) -> dict[str, Any]:
    """Fields of an `Architecture` that Megatron's arguments state."""
    values = expert_fields(args, file, is_core=is_core)
    values["moe_intermediate_size"] = values.pop("expert_size")
    return values


arguments = expert_arguments
inexpressible = inexpressible_experts
