"""Memory and arithmetic of a `qwen3`: activations that a layer saves, FLOPs per token."""

from functools import partial

from tokamake.models.common import activation_memory, flops

flops_per_token = partial(flops.per_token, num_mlp_matrices=3)
"""Floating-point operations of one token's forward and backward pass."""

saved_activations = partial(activation_memory.gated_layer, head_norms=True)
"""Bytes that a layer saves per token for its backward pass."""
