"""Memory and arithmetic of a `qwen3`: activations that a layer saves, FLOPs per token."""

from functools import partial

from tokamake.config.architecture import Architecture
from tokamake.models.common import costs

flops_per_token = partial(costs.flops_per_token, num_mlp_matrices=3)


def saved_activations(
    architecture: Architecture, *, size: int, fused_norm: bool
) -> costs.SavedActivations:
    """Bytes that a layer saves per token for its backward pass: a gated layer, and norms of heads.

    See `costs.gated_layer` for the arguments.
    """
    layer = costs.gated_layer(architecture, size=size, fused_norm=fused_norm)
    width = architecture.query_size + architecture.key_value_size
    norms = costs.rms_norm_bytes(width, size, fused=fused_norm)
    return layer._replace(split=layer.split + norms)
