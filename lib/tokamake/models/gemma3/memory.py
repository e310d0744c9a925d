"""Memory and arithmetic of a `gemma3`: activations that a layer saves, FLOPs per token."""

from functools import partial

from tokamake.models.common import costs

flops_per_token = partial(costs.flops_per_token, num_mlp_matrices=3)

saved_activations = partial(
    costs.gated_layer_with_four_norms, of_layer=costs.gated_layer_with_head_norms
)
