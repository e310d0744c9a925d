"""A `mixtral` in Megatron's terms."""

from functools import partial

from tokamake.models.common.megatron_experts import (
    expert_arguments,
    expert_fields,
    expert_layer,
    inexpressible_experts,
)

ARGUMENTS = {"swiglu": True, "num_experts": True, "normalization": "rmsnorm"}
IS_CORE = True
HAS_DEEPSPEED_EXPERTS = True

layer = expert_layer
fields = partial(expert_fields, family="mixtral")
arguments = expert_arguments
inexpressible = inexpressible_experts
