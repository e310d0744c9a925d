"""How a `llama` is stored: its tensors, and transformers' model type llama."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import HFFormat, same_keys

shapes = partial(tensor_shapes.shapes, gated=True, biased_norms=False)
"""Shape of every tensor of an architecture by its name."""

_KEYS = same_keys(
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    "hidden_act",
    *("attention_bias", "mlp_bias", "rms_norm_eps", "tie_word_embeddings", "initializer_range"),
)

HUGGING_FACE = (
    HFFormat(
        model_type="llama",
        class_name="LlamaForCausalLM",
        keys=_KEYS,
        defaults={
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
    ),
)
"""transformers' model types for this family; the first that fits an architecture is written."""
