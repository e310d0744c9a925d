"""A `deepseek_v3` in Megatron-LM's terms."""

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
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "normalization": "rmsnorm",
}
READ = ("mtp_num_layers",)
IS_CORE = True

layer = expert_layer
fields = partial(expert_fields, family="deepseek_v3")
arguments = expert_arguments
inexpressible = inexpressible_experts
