"""How an `hf_t5` is stored: its tensors, and transformers' model type t5."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import HFFormat


def _positions(architecture: Architecture) -> tensor_shapes.Shapes:
    shape = (
        architecture.setting("relative_attention_num_buckets"),
        architecture.num_attention_heads,
    )
    return {f"model.{stack}_positions.weight": shape for stack in ("encoder", "decoder")}


shapes = partial(
    tensor_shapes.encoder_decoder_shapes, gated=True, biased_norms=False, of_embeddings=_positions
)

_ACTIVATIONS = {"gated-gelu": "gelu_new", "gated-silu": "silu"}
"""hidden_act for each feed_forward_proj."""


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("feed_forward_proj") or "relu"
    fields = {"hidden_act": _ACTIVATIONS.get(kind, kind)}
    # transformers 5 always writes tie_word_embeddings true; models that are not tied do not scale.
    if config.get("scale_decoder_outputs") is False:
        fields["tie_word_embeddings"] = False
    return fields


def _keys(architecture: Architecture) -> dict[str, Any]:
    kinds = {activation: kind for kind, activation in _ACTIVATIONS.items()}
    return {
        "d_kv": architecture.head_dim,
        "feed_forward_proj": kinds[architecture.hidden_act],
        "scale_decoder_outputs": architecture.tie_word_embeddings,
    }


def _attention(layer: int, module: str, *, ours: str) -> dict[str, str]:
    return {f"{ours}.{name}_proj": f"layer.{layer}.{module}.{name}" for name in "qkvo"}


def _mlp(stack: str, layer: int) -> dict[str, str]:
    names = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
    return {
        f"{stack}.post_attention_layernorm": f"layer.{layer}.layer_norm",
        **{
            f"{stack}.mlp.{ours}_proj": f"layer.{layer}.DenseReluDense.{theirs}"
            for ours, theirs in names.items()
        },
    }


_POSITIONS = "block.0.layer.0.SelfAttention.relative_attention_bias"

HUGGING_FACE = (
    HFFormat(
        model_type="t5",
        class_name="T5ForConditionalGeneration",
        keys={
            "vocab_size": ("vocab_size",),
            "hidden_size": ("d_model",),
            "head_dim": ("d_kv",),
            "intermediate_size": ("d_ff",),
            "num_hidden_layers": ("num_layers",),
            "num_decoder_layers": ("num_decoder_layers",),
            "num_attention_heads": ("num_heads",),
            "max_position_embeddings": ("n_positions",),
            "relative_attention_num_buckets": ("relative_attention_num_buckets",),
            "relative_attention_max_distance": ("relative_attention_max_distance",),
            "rms_norm_eps": ("layer_norm_epsilon",),
            "tie_word_embeddings": ("tie_word_embeddings",),
        },
        defaults={
            "vocab_size": 32128,
            "hidden_size": 512,
            "head_dim": 64,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_decoder_layers": 0,
            "num_attention_heads": 8,
            "max_position_embeddings": 512,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        implied={"position_embedding": "relative"},
        supported={"is_encoder_decoder": (True,), "is_decoder": (False,)},
        constants={"is_encoder_decoder": True},
        dropout={"dropout_rate": "hidden"},
        dropout_as_hidden=("attention", "embedding"),
        extra_fields=_fields,
        extra_keys=_keys,
        prefix="",
        layers="block",
        names={
            "embed_tokens": "shared",
            "encoder_positions": f"encoder.{_POSITIONS}",
            "decoder_positions": f"decoder.{_POSITIONS}",
            "input_layernorm": "layer.0.layer_norm",
            **_attention(0, "SelfAttention", ours="self_attn"),
            "cross_attn_layernorm": "layer.1.layer_norm",
            **_attention(1, "EncDecAttention", ours="cross_attn"),
            **_mlp("encoder", 1),
            **_mlp("decoder", 2),
            "encoder.norm": "encoder.final_layer_norm",
            "decoder.norm": "decoder.final_layer_norm",
        },
        copies={
            "lm_head.weight": "model.embed_tokens.weight",
            "encoder.embed_tokens.weight": "model.embed_tokens.weight",
            "decoder.embed_tokens.weight": "model.embed_tokens.weight",
        },
        # Files of old versions have this table, which no attention uses.
        ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)
