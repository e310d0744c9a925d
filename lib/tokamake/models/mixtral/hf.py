"""How a `mixtral` is stored: its tensors, and transformers' model type mixtral."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import GATED_KEYS, HFFormat, same_keys
from tokamake.models.common.hf_windows import Windows

shapes = partial(
    tensor_shapes.shapes, gated=True, biased_norms=False, of_mlp=tensor_shapes.expert_mlp
)

_EXPERTS = "block_sparse_moe.experts.{}"

HUGGING_FACE = (
    HFFormat(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        keys={
            **GATED_KEYS,
            **same_keys("num_experts_per_tok"),
            "num_experts": ("num_local_experts", "num_experts"),
        },
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        implied={"position_embedding": "rotary", "norm_topk_prob": True},
        dropout={"attention_dropout": "attention"},
        supported={"router_jitter_noise": (0.0, 0, None)},
        windows=Windows(None),
        names={
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.experts.gate_proj": f"{_EXPERTS}.w1",
            "mlp.experts.up_proj": f"{_EXPERTS}.w3",
            "mlp.experts.down_proj": f"{_EXPERTS}.w2",
        },
    ),
)

REFUSED = {
    "dbrx": "its experts are stored in one matrix, and it clamps queries, keys and values",
    "granitemoe": "it scales embeddings, attention scores, residuals and logits",
}
