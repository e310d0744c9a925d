"""How a `llama` is stored: its tensors, and transformers' model type llama."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import SHAPE_KEYS, HFFormat, same_keys

shapes = partial(tensor_shapes.shapes, gated=True, biased_norms=False)

_KEYS = SHAPE_KEYS | same_keys(
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
