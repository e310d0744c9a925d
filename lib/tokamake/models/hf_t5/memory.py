"""Memory and arithmetic of an `hf_t5`: activations that a layer saves, FLOPs per token."""

from functools import partial

from tokamake.models.common import costs

saved_activations = costs.gated_layer

saved_by_decoder = partial(costs.decoder_layer, of_layer=costs.gated_layer)

flops_per_token = partial(costs.flops_per_encoder_token, num_mlp_matrices=3)
