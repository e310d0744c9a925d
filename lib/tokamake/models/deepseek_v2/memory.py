"""Memory and arithmetic of `deepseek_v2`: activations that a layer saves, FLOPs per token."""

from functools import partial

from tokamake.models.common import costs

flops_per_token = partial(
    costs.flops_per_token_of_experts, of_attention=costs.latent_attention_products
)
saved_activations = partial(costs.gated_experts_with_latent_attention, fp32_router=False)
