"""Memory and arithmetic of a `gpt`: activations that a layer saves, FLOPs per token."""

from functools import partial

from tokamake.models.common import activation_memory, model_flops

flops_per_token = partial(model_flops.per_token, num_mlp_matrices=2)
"""Floating-point operations of one token's forward and backward pass."""

saved_activations = activation_memory.plain_layer
"""Bytes that a layer saves per token for its backward pass."""
