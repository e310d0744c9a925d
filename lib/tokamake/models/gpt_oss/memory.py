"""Memory and arithmetic of `gpt_oss`: activations that a layer saves, FLOPs per token."""

from tokamake.models.common import costs

flops_per_token = costs.flops_per_token_of_experts
saved_activations = costs.gated_experts_with_biases
