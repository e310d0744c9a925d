"""Memory and arithmetic of a `gpt_neox`: activations that a layer saves, FLOPs per token."""

from functools import partial

from tokamake.config.architecture import Architecture
from tokamake.models.common import costs

flops_per_token = partial(costs.flops_per_token, num_mlp_matrices=2)


def saved_activations(
    architecture: Architecture, *, size: int, fused_norm: bool
) -> costs.SavedActivations:
    """Bytes that a layer saves per token for its backward pass; parallel norms share their input.

    See `costs.plain_layer` for the arguments.
    """
    layer = costs.plain_layer(architecture, size=size, fused_norm=fused_norm)
    if not architecture.setting("use_parallel_residual"):
        return layer
    return layer._replace(states=layer.states // 2)
