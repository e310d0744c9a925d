"""How a `smollm3` is stored: its tensors, and transformers' model type smollm3."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.config.layer_intervals import interval_of
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import GATED_KEYS, HFFormat, same_keys

shapes = partial(tensor_shapes.shapes, gated=True, biased_norms=False)

_KEYS = GATED_KEYS | same_keys("attention_bias", "mlp_bias")
_ABSENT = {"use_sliding_window": False}
_INTERVAL = 4
"""no_rope_layer_interval of a config without it."""


def _interval(config: Mapping[str, Any]) -> int | None:
    """Every how many layers one has no positions; None: they are at irregular places."""
    stated = config.get("no_rope_layer_interval", _INTERVAL)
    listed = config.get("no_rope_layers")
    if listed is None:
        return int(stated)
    number = config.get("num_hidden_layers") or len(listed)
    # The name of the key reads the other way round: 1 is a layer with rotary positions.
    return interval_of([not rotates for rotates in listed[:number]], stated)


def _irregular(config: Mapping[str, Any]) -> str | None:
    listed, number = config.get("no_rope_layers"), config.get("num_hidden_layers")
    if listed is not None and number and len(listed) < number:
        return f"no_rope_layers: has {len(listed)} entries for {number} layers; give one a layer"
    if _interval(config) is not None:
        return None
    return (
        f"no_rope_layers: {config['no_rope_layers']}: is not supported; choose a model in which "
        "layers without positions are equally far from each other"
    )


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"no_rope_layer_interval": _interval(config)}


def _own_keys(architecture: Architecture) -> dict[str, Any]:
    interval = architecture.setting("no_rope_layer_interval")
    layers = [int(architecture.rotates(n)) for n in range(architecture.num_hidden_layers)]
    return {"no_rope_layer_interval": interval, "no_rope_layers": layers}


HUGGING_FACE = (
    HFFormat(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        keys=_KEYS,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        supported={key: (value,) for key, value in _ABSENT.items()},
        # Without pad_token_id, transformers would take a token that small vocabularies lack.
        constants={**_ABSENT, "pad_token_id": None},
        problem=_irregular,
        extra_fields=_fields,
        extra_keys=_own_keys,
    ),
)

REFUSED = {
    "llama4": "its layers have several experts, and some attend to chunks",
    "llama4_text": "its layers have several experts, and some attend to chunks",
}
