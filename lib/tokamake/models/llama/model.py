"""Llama (arXiv 2302.13971): RMSNorm, rotary positions, grouped attention, SwiGLU.

Weights come from a checkpoint (`tokamake.checkpoint`), or `common.random_weights` draws them. The
trainer, evaluation and generation call the model for logits.
"""

from tokamake.models.common.decoder import Decoder

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": ("silu",),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": (False, True),
}

INTERMEDIATE_SIZE = (8, 3, 256)


class Model(Decoder):
    """A Llama; its parameters have Hugging Face's names, see `tensor_name`."""

    is_gated = True
