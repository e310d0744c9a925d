"""Memory and arithmetic of a `qwen3`: activations that a layer saves, FLOPs per token."""

from tokamake.config.architecture import Architecture
from tokamake.models.common import flops
from tokamake.models.common.activation_memory import (
    SavedActivations,
    attention_bytes,
    rms_norm_bytes,
)


def flops_per_token(architecture: Architecture, sequence_length: int) -> int:
    """Floating-point operations of one token's forward and backward pass, see `common.flops`."""
    return flops.per_token(architecture, sequence_length, num_mlp_matrices=3)


def saved_activations(
    architecture: Architecture, *, size: int, fused_norm: bool
) -> SavedActivations:
    """Bytes that a layer saves per token for its backward pass.

    As a `llama`, and what the norms of query and key heads save. See there for the arguments.
    """
    attention, hidden = attention_bytes(architecture, size), architecture.hidden_size
    inner = architecture.intermediate_size * size
    heads = architecture.query_size + architecture.key_value_size
    head_norms = rms_norm_bytes(heads, size, fused=fused_norm)
    return SavedActivations(
        states=2 * rms_norm_bytes(hidden, size, fused=fused_norm),
        gathered=2 * hidden * size,
        split=attention + head_norms + 4 * inner,
        products=attention + 2 * inner,
    )
