"""A `mistral` in Megatron's terms: modules of a layer, arguments of its function.

Megatron has no name for it: files without tokamake's arguments and without a window are read as a
`llama`, which computes the same.
"""

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    GATED_LAYER,
    rms_norm_arguments,
    rms_norm_fields_without_biases,
)

ARGUMENTS = {"swiglu": True, "window_size": True, "normalization": "rmsnorm"}

LAYER = GATED_LAYER

fields = rms_norm_fields_without_biases
arguments = rms_norm_arguments


def inexpressible(architecture: Architecture, *, is_megatron_lm: bool) -> list[str]:
    return []
