"""SmolLM3: a Llama in which every fourth layer has no positions (NoPE, arXiv 2501.18795).

Sliding windows are not supported; the published model has none.
"""

from tokamake.models.common.decoder import Decoder

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 2000000.0,
    "rope_scaling": None,
    "no_rope_layer_interval": 4,
    "hidden_act": ("silu",),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": (True, False),
}


class Model(Decoder):
    """A SmolLM3; its parameters have Hugging Face's names, see `tensor_name`."""

    is_gated = True
