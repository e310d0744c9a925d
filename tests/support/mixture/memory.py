"""Memory and arithmetic of a `mixture`: every token uses three experts of three matrices."""

from functools import partial

from tokamake.models.common import activation_memory, model_flops

flops_per_token = partial(model_flops.per_token, num_mlp_matrices=9)
saved_activations = activation_memory.gated_layer
