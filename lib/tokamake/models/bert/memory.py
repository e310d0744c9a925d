"""Memory and arithmetic of a `bert`: activations that a layer saves, FLOPs per token."""

from tokamake.config.architecture import Architecture
from tokamake.models.common import costs

saved_activations = costs.plain_layer


def flops_per_token(architecture: Architecture, sequence_length: int) -> int:
    """Floating-point operations of one token's forward and backward pass.

    The head of masked tokens has one more product. The head of the order of sentences, a product
    per sample, is left out.
    """
    layers = costs.flops_per_token(architecture, sequence_length, num_mlp_matrices=2)
    return layers + 3 * 2 * architecture.hidden_size**2
