"""DeepSeek-V2 (arXiv 2405.04434): latent attention, shared experts, groups of experts.

Scores of experts are a softmax. With `n_group`, a token uses experts of the `topk_group` groups
with the most probable one. The first `first_k_dense_replace` layers have an MLP of the width
`intermediate_size`. An expert has the width `moe_intermediate_size`; the MLP that all tokens pass
is `n_shared_experts` times as wide.
"""

from typing import Any

from tokamake.models.common.experts import ExpertDecoder
from tokamake.models.common.latent_attention import LatentAttention

HAS_ROUTERS = True

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": ("silu",),
    "attention_bias": (False, True),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (False, True),
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}


class Model(ExpertDecoder):
    """A DeepSeek-V2; its parameters have Hugging Face's names, except for stacks of experts."""

    def build_attention(self) -> Any:
        return LatentAttention(self.architecture, self.mesh)
