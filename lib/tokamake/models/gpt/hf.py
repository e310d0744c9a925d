"""How a `gpt` is stored: its tensors, and transformers' gpt2, gpt_bigcode, starcoder2 and bloom."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import SHAPE_KEYS, HFFormat, same_keys


def _embeddings(architecture: Architecture) -> tensor_shapes.Shapes:
    """The norm of embeddings."""
    if not architecture.embedding_layernorm:
        return {}
    width = (architecture.hidden_size,)
    return tensor_shapes.with_bias("model.embed_layernorm", width, has_bias=True)


shapes = partial(tensor_shapes.shapes, gated=False, biased_norms=True, of_embeddings=_embeddings)

_KEYS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("n_embd", "hidden_size", "n_embed"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    **same_keys("layer_norm_epsilon", "initializer_range", "tie_word_embeddings"),
}
_DEFAULTS = {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True}
_DROPOUT = {"attn_pdrop": "attention", "embd_pdrop": "embedding", "resid_pdrop": "hidden"}


def _four_times(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Width of an MLP that config.json does not state."""
    if fields.get("intermediate_size") is None and isinstance(fields.get("hidden_size"), int):
        return {"intermediate_size": 4 * fields["hidden_size"]}
    return {}


def _bigcode_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return _four_times(fields) | (
        {"num_key_value_heads": 1} if fields.get("multi_query", True) else {}
    )


def _bigcode_keys(architecture: Architecture) -> dict[str, Any]:
    return {"multi_query": architecture.num_key_value_heads == 1}


GPT2 = HFFormat(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    keys=_KEYS
    | {
        "intermediate_size": ("n_inner",),
        "max_position_embeddings": ("n_positions", "max_position_embeddings"),
        "hidden_act": ("activation_function",),
    },
    defaults=_DEFAULTS | {"max_position_embeddings": 1024, "hidden_act": "gelu_new"},
    implied={
        "position_embedding": "learned",
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_layernorm": False,
    },
    supported={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    dropout=_DROPOUT,
    extra_fields=_four_times,
    prefix="transformer.",
    layers="h",
    names={
        "embed_tokens": "wte",
        "embed_positions": "wpe",
        "norm": "ln_f",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    fused="attn.c_attn",
    fused_rows="stacked",
    transposed=True,
)
"""GPT-2 and its kin: every head has its own keys and values."""

GPT_BIGCODE = HFFormat(
    model_type="gpt_bigcode",
    class_name="GPTBigCodeForCausalLM",
    keys=GPT2.keys,
    defaults=_DEFAULTS | {"max_position_embeddings": 1024, "hidden_act": "gelu_pytorch_tanh"},
    implied=GPT2.implied,
    supported={"scale_attn_weights": (True,), "add_cross_attention": (False,)},
    dropout=_DROPOUT,
    extra_fields=_bigcode_fields,
    extra_keys=_bigcode_keys,
    prefix="transformer.",
    layers="h",
    names=GPT2.names,
    fused="attn.c_attn",
)
"""StarCoder and SantaCoder: all heads share one key and value head."""

STARCODER2 = HFFormat(
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    keys={
        **SHAPE_KEYS,
        "attention_bias": ("use_bias",),
        "mlp_bias": ("use_bias",),
        "layer_norm_epsilon": ("norm_epsilon",),
        **same_keys("initializer_range", "tie_word_embeddings"),
    },
    defaults={
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.018042,
        "tie_word_embeddings": True,
    },
    implied={"position_embedding": "rotary", "embedding_layernorm": False},
    supported={"sliding_window": (None,)},
    constants={"sliding_window": None},
    dropout={
        "attention_dropout": "attention",
        "embedding_dropout": "embedding",
        "residual_dropout": "hidden",
    },
    names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
)
"""Rotary positions."""

BLOOM = HFFormat(
    model_type="bloom",
    class_name="BloomForCausalLM",
    keys=_KEYS
    | {"hidden_size": ("hidden_size", "n_embed"), "max_position_embeddings": ("seq_length",)},
    defaults=_DEFAULTS | {"max_position_embeddings": 2048},
    implied={
        "position_embedding": "alibi",
        "hidden_act": "gelu_new",
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_layernorm": True,
    },
    supported={"apply_residual_connection_post_layernorm": (False,)},
    dropout={"attention_dropout": "attention", "hidden_dropout": "hidden"},
    extra_fields=_four_times,
    prefix="transformer.",
    layers="h",
    names={
        "embed_tokens": "word_embeddings",
        "embed_layernorm": "word_embeddings_layernorm",
        "norm": "ln_f",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    fused="self_attention.query_key_value",
)
"""ALiBi, and a norm of the embeddings."""

HUGGING_FACE = (GPT2, GPT_BIGCODE, STARCODER2, BLOOM)

REFUSED = {
    "opt": "its positions begin at 2, and some sizes norm results",
}
