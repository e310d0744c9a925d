"""Memory and arithmetic of a `mixture`: every token uses three experts of three matrices."""

from functools import partial

from tokamake.models.common import costs

flops_per_token = partial(costs.flops_per_token, num_mlp_matrices=9)
saved_activations = costs.gated_layer
