"""Qwen2 and Qwen2.5, dense (arXiv 2407.10671): a Llama with biases of queries, keys and values.

Sliding windows are not supported; the published models are configured without.
"""

from tokamake.models.common.decoder import Decoder
from tokamake.models.common.layers import Attention

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (False, True),
}


class Model(Decoder):
    """A Qwen2; its parameters have Hugging Face's names, see `tensor_name`."""

    is_gated = True

    def build_attention(self) -> Attention:
        return Attention(self.architecture, self.mesh, qkv_bias=True)
