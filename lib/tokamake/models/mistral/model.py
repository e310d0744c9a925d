"""Mistral (arXiv 2310.06825), Nemo and Small: a Llama without biases whose head_dim is free.

Layers of Mistral 7B v0.1 attend to a window; later models have none.
"""

from tokamake.models.common.decoder import Decoder

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": 0,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": (False, True),
}

INTERMEDIATE_SIZE = (7, 2, 256)


class Model(Decoder):
    """A Mistral; its parameters have Hugging Face's names, see `tensor_name`."""

    is_gated = True
