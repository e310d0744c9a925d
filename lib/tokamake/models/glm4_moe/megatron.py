"""A `glm4_moe` in Megatron-LM's terms."""

from functools import partial

from tokamake.models.common.megatron_experts import (
    expert_arguments,
    expert_fields,
    expert_layer,
    inexpressible_experts,
)

ARGUMENTS = {
    "swiglu": True,
    "num_experts": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "normalization": "rmsnorm",
}
READ = ("mtp_num_layers", "qk_layernorm", "rotary_percent")
IS_CORE = True

layer = expert_layer
fields = partial(expert_fields, family="glm4_moe")
arguments = expert_arguments
inexpressible = inexpressible_experts
