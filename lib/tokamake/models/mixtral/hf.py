"""How a `mixtral` is stored: its tensors, and transformers' model type mixtral."""

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_experts import expert_format, expert_keys
from tokamake.models.common.hf_windows import Windows

shapes = tensor_shapes.expert_shapes

_EXPERTS = "block_sparse_moe.experts.{}"

HUGGING_FACE = (
    expert_format(
        "mixtral",
        "MixtralForCausalLM",
        keys=expert_keys("num_experts_per_tok", number="num_local_experts"),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-5,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        implied={"norm_topk_prob": True},
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
    "jamba": "some of its layers are Mamba's",
    "minimax": "some of its layers have linear attention",
    "dbrx": "its experts are stored in one matrix, and it clamps queries, keys and values",
    "granitemoe": "it scales embeddings, attention scores, residuals and logits",
    "granitemoeshared": "it scales embeddings, scores, residuals and logits, and has an MLP that "
    "all tokens pass beside their experts",
    "granitemoehybrid": "some of its layers are Mamba's",
    "phimoe": "it has LayerNorms, and routers that choose by sparsemixer",
}
