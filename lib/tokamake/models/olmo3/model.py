"""OLMo 3 (arXiv 2512.13961): an OLMo 2 most of whose layers attend to a window.

Each `full_attention_interval`-th layer sees all earlier tokens. Its rotary positions alone are
scaled; layers with a window have `local_rope_theta`.
"""

from tokamake.models.common.decoder import Decoder
from tokamake.models.common.head_norms import AllHeadsRMSNorm
from tokamake.models.common.layers import Attention, PostNormLayer

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "local_rope_theta": 500000.0,
    "sliding_window": 4096,
    "full_attention_interval": 4,
    "hidden_act": ("silu",),
    "attention_bias": (False, True),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (False, True),
}


class Model(Decoder):
    """An OLMo 3; its parameters have Hugging Face's names, see `tensor_name`."""

    is_gated = True

    def build_attention(self) -> Attention:
        return Attention(self.architecture, self.mesh, head_norm=AllHeadsRMSNorm)

    def build_layer(self) -> PostNormLayer:
        return PostNormLayer(self.build_norm, self.build_attention(), mlp=self.build_mlp())
