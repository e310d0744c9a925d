"""Memory and arithmetic of a `llama`: activations that a layer saves, FLOPs per token."""

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

    Both norms save their inputs; their outputs are the inputs of projections. Attention saves
    queries, keys, values, its result and normalizers. The MLP saves the gate, its SiLU, the up
    projection and their product.

    Args:
        architecture: shape of the model.
        size: bytes per number of the forward pass.
        fused_norm: whether the device has RMSNorm as one kernel.
    """
    attention = attention_bytes(architecture, size)
    inner = architecture.intermediate_size * size
    return SavedActivations(
        states=2 * rms_norm_bytes(architecture.hidden_size, size, fused=fused_norm),
        gathered=2 * architecture.hidden_size * size,
        split=attention + 4 * inner,
        products=attention + 2 * inner,
    )
