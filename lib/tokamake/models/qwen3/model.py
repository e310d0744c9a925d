"""Qwen3, dense (arXiv 2505.09388): a Llama whose query and key heads are normed before rotation.

The norms of heads (QK-norm) keep training stable; Qwen2's biases are gone. head_dim is free of
hidden_size / num_attention_heads. Sliding windows are not supported.
"""

from tokamake.models.common.decoder import Decoder
from tokamake.models.common.head_norms import HeadRMSNorm
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
    """A Qwen3; its parameters have Hugging Face's names, see `tensor_name`."""

    is_gated = True

    def build_attention(self) -> Attention:
        return Attention(self.architecture, self.mesh, head_norm=HeadRMSNorm)
