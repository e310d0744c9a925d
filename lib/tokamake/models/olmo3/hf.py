"""How an `olmo3` is stored: its tensors, and transformers' model type olmo3."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import GATED_KEYS, HFFormat, same_keys
from tokamake.models.common.hf_windows import Windows

shapes = partial(
    tensor_shapes.shapes,
    gated=True,
    biased_norms=False,
    form=tensor_shapes.LayerForm(norms="after", of_attention=tensor_shapes.all_head_norms),
)

_KEYS = GATED_KEYS | same_keys("attention_bias")

HUGGING_FACE = (
    HFFormat(
        model_type="olmo3",
        class_name="Olmo3ForCausalLM",
        keys=_KEYS,
        defaults={
            "max_position_embeddings": 2048,
            "rope_theta": 500000.0,
            "local_rope_theta": 500000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        windows=Windows(4096, interval=4),
        # transformers' default is a token, whose embedding it would not train.
        constants={"pad_token_id": None},
    ),
)

NOT_IN_MEGATRON = "it norms all heads together, and Megatron norms each head alone"

REFUSED = {
    "exaone4": "it norms each head alone, and layers without a window can have no positions",
}
