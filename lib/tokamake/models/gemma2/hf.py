"""How a `gemma2` is stored: its tensors, and transformers' model type gemma2."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import GATED_KEYS, HFFormat, same_keys
from tokamake.models.common.hf_windows import Windows

shapes = partial(
    tensor_shapes.shapes,
    gated=True,
    biased_norms=False,
    form=tensor_shapes.LayerForm(norms="both"),
)

_KEYS = GATED_KEYS | same_keys("attention_bias") | {"hidden_act": ("hidden_activation",)}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    caps = {name: float(config.get(name, usual) or 0) for name, usual in _CAPS.items()}
    return {**caps, "query_pre_attn_scalar": float(config.get("query_pre_attn_scalar", 256))}


def _own_keys(architecture: Architecture) -> dict[str, Any]:
    scalar = architecture.setting("query_pre_attn_scalar")
    return {
        **{name: architecture.setting(name) or None for name in _CAPS},
        # transformers wants a whole number.
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "head_dim": architecture.head_dim,
    }


HUGGING_FACE = (
    HFFormat(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        keys=_KEYS,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "hidden_act": "gelu_pytorch_tanh",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        supported={"use_bidirectional_attention": (None, False)},
        windows=Windows(4096, interval=2),
        # transformers' default is a token, whose embedding it would not train.
        constants={"pad_token_id": None},
        extra_fields=_fields,
        extra_keys=_own_keys,
    ),
)

REFUSED = {
    "recurrent_gemma": "some of its layers are recurrent",
    "vaultgemma": "it does not norm the results of attention and MLP",
}
