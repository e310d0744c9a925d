"""How a `qwen3` is stored: its tensors, and transformers' model type qwen3."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import GATED_KEYS, HFFormat

shapes = partial(
    tensor_shapes.shapes,
    gated=True,
    biased_norms=False,
    form=tensor_shapes.LayerForm(of_attention=tensor_shapes.head_norms),
)

# Biases and windows exist in transformers' code, but no published Qwen3 has them.
_ABSENT = {"attention_bias": False, "use_sliding_window": False}

HUGGING_FACE = (
    HFFormat(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        keys=GATED_KEYS,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
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
        # transformers takes a missing head_dim for 128, not for hidden_size / heads.
        extra_keys=lambda architecture: {"head_dim": architecture.head_dim},
    ),
)

REFUSED = {
    "apertus": "its MLPs have no gate, and the activation xielu",
    "hunyuan_v1_dense": "it norms heads after it has rotated them",
    "lfm2": "some of its layers are convolutions",
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "some of its layers have linear attention"),
}
