"""OLMoE (arXiv 2409.02060): a mixture of many small experts in each layer.

Queries and keys are normed over all heads, as in OLMo 2, and inputs are normed, as in a Llama. The
weights of a token's experts are raw probabilities, unless `norm_topk_prob` scales them.
`intermediate_size` is the width of an expert.
"""

from tokamake.models.common.experts import ExpertDecoder
from tokamake.models.common.head_norms import AllHeadsRMSNorm
from tokamake.models.common.layers import Attention

HAS_ROUTERS = True

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": ("silu",),
    "attention_bias": (False, True),
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": (False, True),
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": (False, True),
}


class Model(ExpertDecoder):
    """An OLMoE; its parameters have Hugging Face's names, except for stacks of experts."""

    def build_attention(self) -> Attention:
        return Attention(self.architecture, self.mesh, head_norm=AllHeadsRMSNorm)
