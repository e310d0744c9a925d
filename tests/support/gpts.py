"""Tiny GPTs for tests: our shapes, and transformers' models of the same shape."""

from typing import Any

import torch

from tests.support.random_tensors import randomized
from tokamake.config.architecture import Architecture


def gpt(**values: Any) -> Architecture:
    """A shape with 4 heads of width 16, 3 layers and an odd vocabulary."""
    usual = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "layer_norm_epsilon": 1e-6,
    }
    return Architecture(family="gpt", **(usual | values))


LEARNED = gpt()
MQA = gpt(num_key_value_heads=1, hidden_act="gelu_pytorch_tanh", intermediate_size=96)
ROTARY = gpt(position_embedding="rotary", num_key_value_heads=2, rope_theta=5000.0)
ALIBI = gpt(position_embedding="alibi", embedding_layernorm=True)

ARCHITECTURES = {
    "gpt2": LEARNED,
    "gpt2-untied": gpt(tie_word_embeddings=False, hidden_act="gelu", intermediate_size=48),
    "gpt2-relu": gpt(hidden_act="relu", vocab_size=128),
    "gpt_bigcode": MQA,
    "gpt_bigcode-untied": MQA.model_copy(update={"tie_word_embeddings": False}),
    "starcoder2": ROTARY,
    "starcoder2-mqa-plain": gpt(
        position_embedding="rotary",
        num_key_value_heads=1,
        attention_bias=False,
        mlp_bias=False,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    ),
    "starcoder2-wide-heads": gpt(position_embedding="rotary", num_key_value_heads=2, head_dim=24),
    "bloom": ALIBI,
    "bloom-6-heads": gpt(
        position_embedding="alibi",
        embedding_layernorm=True,
        hidden_size=96,
        intermediate_size=384,
        num_attention_heads=6,
        num_key_value_heads=6,
    ),
}
"""By the model type of transformers that each is stored as."""

_STARCODER = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings"),
)
"""Fields of Starcoder2Config with our names."""


def reference(
    architecture: Architecture,
    dtype: torch.dtype = torch.float32,
    *,
    multi_query: bool | None = None,
) -> Any:
    """transformers' model with random weights, norms and biases included, without dropout."""
    import transformers

    torch.manual_seed(0)
    shape = architecture
    kind, many = shape.position_embedding, shape.num_key_value_heads > 1
    same = {
        "vocab_size": shape.vocab_size,
        "initializer_range": shape.initializer_range,
        "tie_word_embeddings": shape.tie_word_embeddings,
    }
    if kind == "rotary":
        rope = {"rope_theta": shape.rope_theta, "rope_type": "default"}
        if shape.rope_scaling:
            rope |= shape.rope_scaling.model_dump(exclude_none=True)
        config = transformers.Starcoder2Config(
            **shape.model_dump(include={*_STARCODER}),
            head_dim=shape.head_dim,
            norm_epsilon=shape.layer_norm_epsilon,
            use_bias=shape.mlp_bias,
            rope_parameters=rope,
            **same,
        )
        model = transformers.Starcoder2ForCausalLM(config)
    elif kind == "alibi":
        config = transformers.BloomConfig(
            hidden_size=shape.hidden_size,
            n_layer=shape.num_hidden_layers,
            n_head=shape.num_attention_heads,
            layer_norm_epsilon=shape.layer_norm_epsilon,
            seq_length=shape.max_position_embeddings,
            **same,
        )
        model = transformers.BloomForCausalLM(config)
    else:
        same |= {
            "n_embd": shape.hidden_size,
            "n_inner": shape.intermediate_size,
            "n_layer": shape.num_hidden_layers,
            "n_head": shape.num_attention_heads,
            "n_positions": shape.max_position_embeddings,
            "activation_function": shape.hidden_act,
            "layer_norm_epsilon": shape.layer_norm_epsilon,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
        if many and multi_query is None:
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**same))
        else:
            config = transformers.GPTBigCodeConfig(
                **same, multi_query=bool(multi_query or not many)
            )
            model = transformers.GPTBigCodeForCausalLM(config)
    return randomized(model, dtype)


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """A transformers model's tensors, the output layer left out if tied."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors
