"""Memory and arithmetic of `glm4_moe`: activations that a layer saves, FLOPs per token."""

from tokamake.config.architecture import Architecture
from tokamake.models.common import costs

flops_per_token = costs.flops_per_token_of_experts


def saved_activations(
    architecture: Architecture, *, size: int, fused_norm: bool
) -> costs.SavedActivations:
    """Bytes per token of a layer with experts; a dense layer has fewer."""
    layer = costs.gated_experts_with_shared(
        architecture, size=size, fused_norm=fused_norm, fp32_router=True
    )
    if not architecture.setting("use_qk_norm"):
        return layer
    return costs.with_head_norms(architecture, layer, size=size, fused_norm=fused_norm)
