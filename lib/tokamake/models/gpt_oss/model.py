"""gpt-oss (arXiv 2508.10925): attention sinks, alternating windows, experts with biases.

Each head has a sink, a score that takes weight from the tokens. Each `full_attention_interval`-th
layer sees all earlier tokens, the others a window. The router and the experts have biases
(`mlp_bias`). Experts clamp their gates and up projections to `swiglu_limit`, and multiply gates by
`swiglu_alpha` inside the sigmoid. `intermediate_size` is the width of an expert.
"""

from tokamake.models.common.experts import ExpertDecoder

HAS_ROUTERS = True

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 150000.0,
    "rope_scaling": None,
    "sliding_window": 128,
    "full_attention_interval": 2,
    "attention_sinks": (True,),
    "attention_bias": (True, False),
    "mlp_bias": (True,),
    "hidden_act": ("silu",),
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": (False, True),
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": (True,),
}


class Model(ExpertDecoder):
    """A gpt-oss; its parameters have Hugging Face's names, except for stacks of experts."""
