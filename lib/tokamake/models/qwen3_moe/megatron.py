"""A `qwen3_moe` in Megatron-LM's terms."""

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
    "qk_layernorm": True,
    "normalization": "rmsnorm",
}
IS_CORE = True

layer = expert_layer
fields = partial(expert_fields, family="qwen3_moe")
arguments = expert_arguments
inexpressible = inexpressible_experts
