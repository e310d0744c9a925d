"""A `gpt_oss` in Megatron-LM's terms."""

from functools import partial

from tokamake.models.common.megatron_experts import (
    expert_arguments,
    expert_fields,
    expert_layer,
    inexpressible_experts,
)

ARGUMENTS = {
    "quick_geglu": True,
    "num_experts": True,
    "softmax_type": "learnable",
    "normalization": "rmsnorm",
}
READ = ("glu_linear_offset", "activation_func_clamp_value")
IS_CORE = True

layer = expert_layer
fields = partial(expert_fields, family="gpt_oss")
arguments = expert_arguments
inexpressible = inexpressible_experts
