"""How an encoder without heads is stored: its tensors, and the names that others have for them."""

from functools import partial

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import HFFormat, same_keys
from tokamake.models.common.megatron_format import ATTENTION, INPUT_NORM, MLP, MLP_NORM


def _embeddings(architecture: Architecture) -> tensor_shapes.Shapes:
    """Embedding of token types."""
    num_types = architecture.setting("type_vocab_size")
    shape = (num_types, architecture.hidden_size)
    return {"model.embed_token_types.weight": shape} if num_types else {}


encoder_shapes = partial(
    tensor_shapes.shapes, gated=False, biased_norms=True, of_embeddings=_embeddings
)
"""Shapes of the tensors of a BERT without heads."""

MEGATRON_BERT = HFFormat(
    model_type="megatron-bert",
    class_name="MegatronBertModel",
    keys={
        **same_keys(
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "max_position_embeddings", "hidden_act"),
        ),
        "layer_norm_epsilon": ("layer_norm_eps",),
        **same_keys("initializer_range", "tie_word_embeddings", "type_vocab_size"),
    },
    # Megatron's epsilon is 1e-5; transformers takes a missing one for 1e-12.
    defaults={
        "vocab_size": 29056,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 512,
        "hidden_act": "gelu",
        "layer_norm_epsilon": 1e-12,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "type_vocab_size": 2,
    },
    implied={"position_embedding": "learned", "attention_bias": True, "mlp_bias": True},
    supported={
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",),
    },
    constants={"is_decoder": False},
    dropout={"attention_probs_dropout_prob": "attention", "hidden_dropout_prob": "hidden"},
    dropout_as_hidden=("embedding",),
    prefix="",
    layers="encoder.layer",
    names={
        "embed_tokens": "embeddings.word_embeddings",
        "embed_positions": "embeddings.position_embeddings",
        "embed_token_types": "embeddings.token_type_embeddings",
        "input_layernorm": "attention.ln",
        "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key",
        "self_attn.v_proj": "attention.self.value",
        "self_attn.o_proj": "attention.output.dense",
        "post_attention_layernorm": "ln",
        "mlp.up_proj": "intermediate.dense",
        "mlp.down_proj": "output.dense",
        "norm": "encoder.ln",
    },
    copies={},
)
"""transformers' model without heads."""

MEGATRON_EMBEDDING = {
    "position_embeddings": "model.embed_positions",
    "tokentype_embeddings": "model.embed_token_types",
}
"""Modules of Megatron's embedding beside the word embeddings."""

MEGATRON_LAYER = (INPUT_NORM, *ATTENTION, MLP_NORM, *MLP)
"""Modules of one of Megatron's layers."""
