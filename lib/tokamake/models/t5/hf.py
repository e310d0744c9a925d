"""How a `t5` is stored: its tensors, and transformers' model type blenderbot."""

from functools import partial
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import HFFormat


def _head(architecture: Architecture) -> tensor_shapes.Shapes:
    assert architecture.vocab_size is not None
    return {"model.head.bias": (architecture.vocab_size,)}


shapes = partial(
    tensor_shapes.encoder_decoder_shapes, gated=False, biased_norms=True, of_heads=_head
)


def _keys(architecture: Architecture) -> dict[str, Any]:
    return {
        "decoder_attention_heads": architecture.num_attention_heads,
        "decoder_ffn_dim": architecture.intermediate_size,
    }


HUGGING_FACE = (
    HFFormat(
        model_type="blenderbot",
        class_name="BlenderbotForConditionalGeneration",
        keys={
            "vocab_size": ("vocab_size",),
            "hidden_size": ("d_model",),
            "intermediate_size": ("encoder_ffn_dim",),
            "num_hidden_layers": ("encoder_layers",),
            "num_decoder_layers": ("decoder_layers",),
            "num_attention_heads": ("encoder_attention_heads",),
            "max_position_embeddings": ("max_position_embeddings",),
            "hidden_act": ("activation_function",),
            "initializer_range": ("init_std",),
            "tie_word_embeddings": ("tie_word_embeddings",),
        },
        defaults={
            "vocab_size": 8008,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 2,
            "num_decoder_layers": 24,
            "num_attention_heads": 32,
            "max_position_embeddings": 128,
            "hidden_act": "gelu",
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
        },
        implied={
            "position_embedding": "learned",
            "attention_bias": True,
            "mlp_bias": True,
            "layer_norm_epsilon": 1e-5,
        },
        supported={"scale_embedding": (False,), "is_encoder_decoder": (True,)},
        equal={
            "decoder_attention_heads": "encoder_attention_heads",
            "decoder_ffn_dim": "encoder_ffn_dim",
        },
        constants={
            "is_encoder_decoder": True,
            "scale_embedding": False,
            "forced_eos_token_id": None,
            "encoder_no_repeat_ngram_size": 0,
        },
        dropout={"attention_dropout": "attention", "dropout": "hidden"},
        dropout_as_hidden=("embedding",),
        extra_keys=_keys,
        names={
            "embed_tokens": "shared",
            "embed_positions": "encoder.embed_positions",
            "input_layernorm": "self_attn_layer_norm",
            "self_attn.o_proj": "self_attn.out_proj",
            "cross_attn_layernorm": "encoder_attn_layer_norm",
            **{f"cross_attn.{name}_proj": f"encoder_attn.{name}_proj" for name in "qkv"},
            "cross_attn.o_proj": "encoder_attn.out_proj",
            "post_attention_layernorm": "final_layer_norm",
            "mlp.up_proj": "fc1",
            "mlp.down_proj": "fc2",
            "encoder.norm": "encoder.layer_norm",
            "decoder.norm": "decoder.layer_norm",
        },
        as_rows={"model.head.bias": "final_logits_bias"},
        copies={
            "lm_head.weight": "model.embed_tokens.weight",
            "model.encoder.embed_tokens.weight": "model.embed_tokens.weight",
            "model.decoder.embed_tokens.weight": "model.embed_tokens.weight",
        },
        twice={"model.decoder.embed_positions.weight": "model.embed_positions.weight"},
    ),
)

REFUSED = {
    "bart": "it norms after attention and MLP, and the family t5, as Megatron, before them",
    "mbart": "it norms its embeddings, and the family t5, as Megatron, does not",
}
