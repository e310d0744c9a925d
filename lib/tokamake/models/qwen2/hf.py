"""How a `qwen2` is stored: its tensors, and transformers' model type qwen2."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import GATED_KEYS, HFFormat

shapes = partial(
    tensor_shapes.shapes,
    gated=True,
    biased_norms=False,
    form=tensor_shapes.LayerForm(qkv_bias=True),
)

# Windows exist in transformers' code, but every published Qwen2 and Qwen2.5 turns them off.
_ABSENT = {"use_sliding_window": False}

HUGGING_FACE = (
    HFFormat(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        keys=GATED_KEYS,
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        supported={key: (value,) for key, value in _ABSENT.items()},
        constants=_ABSENT,
    ),
)

REFUSED = {
    "qwen2_moe": "its layers have several experts",
    "seed_oss": "its output projections of attention and its MLPs can have biases",
    "qwen2_vl": "it reads images",
    "qwen2_5_vl": "it reads images",
}
