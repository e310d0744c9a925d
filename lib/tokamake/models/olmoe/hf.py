"""How an `olmoe` is stored: its tensors, and transformers' model type olmoe."""

from functools import partial

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import EXPERT_NAMES, GATED_KEYS, HFFormat, same_keys


def _head_norms(architecture: Architecture) -> tensor_shapes.Shapes:
    return {
        "self_attn.q_norm.weight": (architecture.query_size,),
        "self_attn.k_norm.weight": (architecture.key_value_size,),
    }


shapes = partial(
    tensor_shapes.shapes,
    gated=True,
    biased_norms=False,
    form=tensor_shapes.LayerForm(of_attention=_head_norms),
    of_mlp=tensor_shapes.expert_mlp,
)

_KEYS = same_keys("attention_bias", "num_experts_per_tok", "norm_topk_prob")

HUGGING_FACE = (
    HFFormat(
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        keys={
            **GATED_KEYS,
            **_KEYS,
            "num_experts": ("num_experts", "num_local_experts"),
        },
        defaults={
            "max_position_embeddings": 4096,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        supported={"clip_qkv": (None,)},
        # transformers' default is a token, whose embedding it would not train.
        constants={"pad_token_id": None, "clip_qkv": None},
        names=EXPERT_NAMES,
    ),
)

NOT_IN_MEGATRON = "it norms all heads together, and Megatron norms each head alone"
