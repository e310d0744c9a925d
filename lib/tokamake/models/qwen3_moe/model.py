"""Qwen3 with mixtures of experts in all layers (arXiv 2505.09388), such as Qwen3-30B-A3B.

Attention is Qwen3's: it norms query and key heads. `moe_intermediate_size` is the width of an
expert. `intermediate_size` would be the width of a layer without experts; published models have no
such layer.
"""

from tokamake.models.common.experts import ExpertDecoder
from tokamake.models.common.head_norms import HeadRMSNorm
from tokamake.models.common.layers import Attention

HAS_ROUTERS = True

DENSE_FAMILIES = ("qwen3",)

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (False, True),
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": (True, False),
}


class Model(ExpertDecoder):
    """A Qwen3 with experts; its parameters have Hugging Face's names, except for stacks."""

    def build_attention(self) -> Attention:
        return Attention(self.architecture, self.mesh, head_norm=HeadRMSNorm)
