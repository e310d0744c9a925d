"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): a Llama whose heads may rotate in part.

Layers of some models attend to a window.
"""

from tokamake.models.common.decoder import Decoder

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "sliding_window": 0,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": (False, True),
}


class Model(Decoder):
    """A Phi-3 whose parameters have the names of Hugging Face's Llama, see `tensor_name`."""

    is_gated = True
