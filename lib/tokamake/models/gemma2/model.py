"""Gemma 2 (arXiv 2408.00118): windows in every second layer, norms on both sides, caps.

Embeddings are scaled, and norms multiply by 1 + weight. Scores of attention and logits are capped
by tanh. query_pre_attn_scalar replaces head_dim in the scale of scores.
"""

from tokamake.models.common.decoder import Decoder
from tokamake.models.common.layers import SandwichLayer

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": 4096,
    "full_attention_interval": 2,
    "query_pre_attn_scalar": 256.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_act": ("gelu_pytorch_tanh",),
    "attention_bias": (False, True),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (True, False),
}


class Model(Decoder):
    """A Gemma 2; its parameters have Hugging Face's names, see `tensor_name`."""

    is_gated = True
    has_centered_norms = True
    scales_embeddings = True

    def build_layer(self) -> SandwichLayer:
        return SandwichLayer(self.build_norm, self.build_attention(), mlp=self.build_mlp())
