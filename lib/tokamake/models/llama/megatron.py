"""A `llama` in Megatron's terms: modules of a layer, arguments of its function."""

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    GATED_LAYER,
    rms_norm_arguments,
    rms_norm_fields,
)

ARGUMENTS = {"swiglu": True, "normalization": "rmsnorm"}

LAYER = GATED_LAYER

fields = rms_norm_fields
arguments = rms_norm_arguments


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    return []
