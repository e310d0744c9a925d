"""How a `mistral` is stored: its tensors, and transformers' model type mistral."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import GATED_KEYS, HFFormat
from tokamake.models.common.hf_windows import Windows

shapes = partial(tensor_shapes.shapes, gated=True, biased_norms=False)

HUGGING_FACE = (
    HFFormat(
        model_type="mistral",
        class_name="MistralForCausalLM",
        keys=GATED_KEYS,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        windows=Windows(4096),
    ),
)

REFUSED = {
    "ministral": "its layer_types may differ; without windows, or with one in each layer, it is a "
    "mistral: set model_type to that",
    "cohere2": "it has LayerNorms, attention and MLP see the same states, and layers without a "
    "window have no positions",
    "ministral3": "it scales queries by their position",
}
