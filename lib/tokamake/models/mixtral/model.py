"""Mixtral (arXiv 2401.04088): a Mistral whose MLPs are mixtures of experts.

The weights of a token's experts add up to 1. `intermediate_size` is the width of an expert.
"""

from tokamake.models.common.experts import ExpertDecoder

HAS_ROUTERS = True

DENSE_FAMILIES = ("llama", "mistral")

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "sliding_window": 0,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": (False, True),
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": (True,),
}

INTERMEDIATE_SIZE = (7, 2, 256)


class Model(ExpertDecoder):
    """A Mixtral; its parameters have Hugging Face's names, except for stacks of experts."""
