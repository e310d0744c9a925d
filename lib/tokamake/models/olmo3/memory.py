"""Memory and arithmetic of an `olmo3`: activations that a layer saves, FLOPs per token.

Norms after attention and MLP save as much as norms before them.
"""

from functools import partial

from tokamake.models.common import costs

flops_per_token = partial(costs.flops_per_token, num_mlp_matrices=3)

saved_activations = costs.gated_layer_with_head_norms
