"""GLM-4.5 (arXiv 2508.06471): grouped heads that rotate in part, experts as in DeepSeek-V3.

The first `first_k_dense_replace` layers have an MLP of the width `intermediate_size`. An expert has
the width `moe_intermediate_size`. `qkv_bias` is transformers' `attention_bias`.
`num_nextn_predict_layers` layers predict further tokens in training (MTP).
"""

from tokamake.models.common.head_norms import HeadRMSNorm
from tokamake.models.common.layers import Attention
from tokamake.models.common.multi_token_prediction import MTPDecoder
from tokamake.models.common.routers import BalancedRouter

HAS_ROUTERS = True
HAS_ROUTER_BIASES = True

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": (False, True),
    "qkv_bias": (False, True),
    "use_qk_norm": (False, True),
    "moe_intermediate_size": 1408,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": (True, False),
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}


class Model(MTPDecoder):
    """A GLM-4.5; its parameters have Hugging Face's names, except for stacks of experts."""

    router = BalancedRouter

    def build_attention(self) -> Attention:
        own = self.architecture.setting
        norm = {"head_norm": HeadRMSNorm} if own("use_qk_norm") else {}
        return Attention(self.architecture, self.mesh, qkv_bias=own("qkv_bias"), **norm)
