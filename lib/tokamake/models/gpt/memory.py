"""Memory and arithmetic of a `gpt`: activations that a layer saves, FLOPs per token."""

from functools import partial

from tokamake.config.architecture import Architecture
from tokamake.models.common import model_flops
from tokamake.models.common.activation_memory import SavedActivations, attention_bytes

flops_per_token = partial(model_flops.per_token, num_mlp_matrices=2)
"""Floating-point operations of one token's forward and backward pass."""


def saved_activations(
    architecture: Architecture, *, size: int, fused_norm: bool
) -> SavedActivations:
    """Bytes that a layer saves per token for its backward pass.

    LayerNorm is one kernel on all devices and saves its input. The MLP saves the input and the
    output of its activation. See `activation_memory.gated_layer` for attention and the arguments.
    """
    attention = attention_bytes(architecture, size)
    inner = architecture.intermediate_size * size
    return SavedActivations(
        states=2 * architecture.hidden_size * size,
        gathered=2 * architecture.hidden_size * size,
        split=attention + 2 * inner,
        products=attention + inner,
    )
