"""OLMo 2 (arXiv 2501.00656): a Llama that norms results of attention and MLP, not their inputs.

Queries and keys are normed over all heads before rotation (QK-norm).
"""

from tokamake.models.common.decoder import Decoder
from tokamake.models.common.head_norms import AllHeadsRMSNorm
from tokamake.models.common.layers import Attention, PostNormLayer

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "hidden_act": ("silu",),
    "attention_bias": (False, True),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (False, True),
}


class Model(Decoder):
    """An OLMo 2; its parameters have Hugging Face's names, see `tensor_name`."""

    is_gated = True

    def build_attention(self) -> Attention:
        return Attention(self.architecture, self.mesh, head_norm=AllHeadsRMSNorm)

    def build_layer(self) -> PostNormLayer:
        return PostNormLayer(self.build_norm, self.build_attention(), mlp=self.build_mlp())
