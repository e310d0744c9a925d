"""Memory and arithmetic of a `gemma2`: activations that a layer saves, FLOPs per token."""

from functools import partial

from tokamake.models.common import costs

flops_per_token = partial(costs.flops_per_token, num_mlp_matrices=3)

saved_activations = costs.gated_layer_with_four_norms
