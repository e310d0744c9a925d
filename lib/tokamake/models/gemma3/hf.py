"""How a `gemma3` is stored: its tensors, and transformers' model type gemma3_text."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import GATED_KEYS, HFFormat, same_keys
from tokamake.models.common.hf_windows import Windows


def _head_norms(architecture: Architecture) -> tensor_shapes.Shapes:
    return {f"self_attn.{each}_norm.weight": (architecture.head_dim,) for each in "qk"}


shapes = partial(
    tensor_shapes.shapes,
    gated=True,
    biased_norms=False,
    form=tensor_shapes.LayerForm(norms="both", of_attention=_head_norms),
)

_KEYS = GATED_KEYS | same_keys("attention_bias") | {"hidden_act": ("hidden_activation",)}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "final_logit_softcapping": float(config.get("final_logit_softcapping") or 0),
        "query_pre_attn_scalar": float(config.get("query_pre_attn_scalar", 256)),
    }


def _own_keys(architecture: Architecture) -> dict[str, Any]:
    scalar = architecture.setting("query_pre_attn_scalar")
    return {
        "final_logit_softcapping": architecture.setting("final_logit_softcapping") or None,
        # transformers wants a whole number.
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "head_dim": architecture.head_dim,
    }


HUGGING_FACE = (
    HFFormat(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        keys=_KEYS,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "local_rope_theta": 10000.0,
            "hidden_act": "gelu_pytorch_tanh",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        supported={"use_bidirectional_attention": (None, False)},
        windows=Windows(4096, interval=6, reads_pattern=True),
        # transformers' default is a token, whose embedding it would not train.
        constants={"pad_token_id": None},
        local_rope_base="rope_local_base_freq",
        extra_fields=_fields,
        extra_keys=_own_keys,
    ),
)

REFUSED = {
    "gemma3": "it reads images; its text model alone has the type gemma3_text",
    "gemma3n": "it reads images and sounds, and its layers have further inputs",
    "gemma3n_text": "its layers have further inputs and alternating updates",
}
