"""How an `olmoe` is stored: its tensors, and transformers' model type olmoe."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_experts import expert_format, expert_keys

shapes = partial(
    tensor_shapes.expert_shapes,
    form=tensor_shapes.LayerForm(of_attention=tensor_shapes.all_head_norms),
)

HUGGING_FACE = (
    expert_format(
        "olmoe",
        "OlmoeForCausalLM",
        keys=expert_keys("attention_bias", "num_experts_per_tok", "norm_topk_prob"),
        defaults={
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        supported={"clip_qkv": (None,)},
        # transformers' default is a token, whose embedding it would not train.
        constants={"pad_token_id": None, "clip_qkv": None},
    ),
)

NOT_IN_MEGATRON = "it norms all heads together, and Megatron norms each head alone"

REFUSED = {"flex_olmo": "its norms come after attention and experts"}
