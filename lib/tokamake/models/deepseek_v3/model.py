"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and experts balanced by a bias.

The first `first_k_dense_replace` layers have an MLP of the width `intermediate_size`. An expert has
the width `moe_intermediate_size`; the MLP that all tokens pass is `n_shared_experts` times as wide.
`num_nextn_predict_layers` layers predict further tokens in training (MTP).
"""

from typing import Any

from tokamake.models.common.latent_attention import LatentAttention
from tokamake.models.common.multi_token_prediction import MTPDecoder
from tokamake.models.common.routers import BalancedRouter

HAS_ROUTERS = True
HAS_ROUTER_BIASES = True

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_interleave": (True, False),
    "hidden_act": ("silu",),
    "attention_bias": (False, True),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (False, True),
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": (True, False),
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}


class Model(MTPDecoder):
    """A DeepSeek-V3; its parameters have Hugging Face's names, except for stacks of experts."""

    router = BalancedRouter

    def build_attention(self) -> Any:
        return LatentAttention(self.architecture, self.mesh)
