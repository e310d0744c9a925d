"""How a `gpt_neox` is stored: its tensors, and transformers' model type gpt_neox."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import HFFormat, same_keys

shapes = partial(tensor_shapes.shapes, gated=False, biased_norms=True)

HUGGING_FACE = (
    HFFormat(
        model_type="gpt_neox",
        class_name="GPTNeoXForCausalLM",
        keys={
            **same_keys("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            **same_keys("num_attention_heads", "max_position_embeddings", "hidden_act"),
            **same_keys("attention_bias", "use_parallel_residual", "tie_word_embeddings"),
            **same_keys("initializer_range"),
            "layer_norm_epsilon": ("layer_norm_eps",),
        },
        defaults={
            "max_position_embeddings": 2048,
            "hidden_act": "gelu",
            "attention_bias": True,
            "use_parallel_residual": True,
            "layer_norm_epsilon": 1e-5,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary", "mlp_bias": True},
        dropout={"attention_dropout": "attention", "hidden_dropout": "hidden"},
        dropout_as_hidden=("embedding",),
        rope_base="rotary_emb_base",
        partial_rotary="rotary_pct",
        prefix="gpt_neox.",
        output="embed_out",
        names={
            "embed_tokens": "embed_in",
            "norm": "final_layer_norm",
            "self_attn.o_proj": "attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        copies={"embed_out.weight": "model.embed_tokens.weight"},
        fused="attention.query_key_value",
        # Masks and frequencies in files of earlier versions.
        ignored=r"(.*\.)?attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    ),
)

REFUSED = {
    "codegen": "it rotates neighboring numbers of heads, and has one norm in a layer",
    "gptj": "it rotates neighboring numbers of heads, and has one norm in a layer",
    "phi": "attention and MLP share a norm",
    "falcon": "attention and MLP can share a norm",
    "gpt_neo": "it has learned positions, and attends to a window in every other layer",
}
