"""Gemma 3, text (arXiv 2503.19786): a Gemma 2 with norms of queries and keys, without caps.

Each `full_attention_interval`-th layer sees all earlier tokens, and its rotary positions may be
scaled. The others attend to a window, and rotate by `local_rope_theta`.
"""

from tokamake.models.common.decoder import Decoder
from tokamake.models.common.head_norms import CenteredHeadRMSNorm
from tokamake.models.common.layers import Attention, SandwichLayer

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "local_rope_theta": 10000.0,
    "sliding_window": 1024,
    "full_attention_interval": 6,
    "query_pre_attn_scalar": 256.0,
    "final_logit_softcapping": 0.0,
    "hidden_act": ("gelu_pytorch_tanh",),
    "attention_bias": (False, True),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (True, False),
}


class Model(Decoder):
    """A Gemma 3; its parameters have Hugging Face's names, see `tensor_name`."""

    is_gated = True
    has_centered_norms = True
    scales_embeddings = True

    def build_attention(self) -> Attention:
        return Attention(self.architecture, self.mesh, head_norm=CenteredHeadRMSNorm)

    def build_layer(self) -> SandwichLayer:
        return SandwichLayer(self.build_norm, self.build_attention(), mlp=self.build_mlp())
