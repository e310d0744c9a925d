"""A `qwen2` in Megatron's terms: modules of a layer, arguments of its function."""

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    GATED_LAYER,
    rms_norm_arguments,
    rms_norm_fields_without_biases,
)

ARGUMENTS = {
    "swiglu": True,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "normalization": "rmsnorm",
}

LAYER = GATED_LAYER

fields = rms_norm_fields_without_biases
arguments = rms_norm_arguments


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    return [] if is_megatron_lm else ["biases of queries, keys and values alone"]
