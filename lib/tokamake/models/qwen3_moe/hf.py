"""How a `qwen3_moe` is stored: its tensors, and transformers' model type qwen3_moe."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_experts import expert_format, expert_keys

shapes = partial(
    tensor_shapes.expert_shapes,
    form=tensor_shapes.LayerForm(of_attention=tensor_shapes.head_norms),
)

# transformers' code has them, but no published model.
_ABSENT = {
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

HUGGING_FACE = (
    expert_format(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        keys=expert_keys("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob"),
        defaults={
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        supported={key: (value, None) for key, value in _ABSENT.items()},
        constants=_ABSENT,
        # transformers reads this key since version 5, and the other one before.
        extra_keys=lambda architecture: {
            "head_dim": architecture.head_dim,
            "num_local_experts": architecture.setting("num_experts"),
        },
    ),
)

REFUSED = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
        "some of its layers have linear attention",
    ),
}
