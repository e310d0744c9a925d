"""How a `mistral` is stored: its tensors, and transformers' model type mistral."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import SHAPE_KEYS, HFFormat, same_keys

shapes = partial(tensor_shapes.shapes, gated=True, biased_norms=False)

_LONGEST = 131072
"""max_position_embeddings of a config without it."""
_WINDOW = 4096
"""sliding_window of a config without it."""


def _hidden_tokens(config: Mapping[str, Any]) -> str | None:
    """Message about a window that hides tokens of the longest sequences."""
    window = config.get("sliding_window", _WINDOW)
    longest = config.get("max_position_embeddings") or _LONGEST
    if window is None or window >= longest:
        return None
    return (
        f"sliding_window: {window}: is shorter than max_position_embeddings {longest}, and "
        f"attention to a window is not supported; set max_position_embeddings to {window} to use "
        "the model for such sequences, or choose a model without a window"
    )


HUGGING_FACE = (
    HFFormat(
        model_type="mistral",
        class_name="MistralForCausalLM",
        keys=SHAPE_KEYS | same_keys("rms_norm_eps", "tie_word_embeddings", "initializer_range"),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": _LONGEST,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        problem=_hidden_tokens,
        constants={"sliding_window": None},
    ),
)
