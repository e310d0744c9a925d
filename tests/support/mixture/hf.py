"""How a `mixture` is stored: stacked here, each expert by itself in Hugging Face's files."""

from functools import partial

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import HFFormat, same_keys


def _experts(architecture: Architecture) -> tensor_shapes.Shapes:
    hidden, inner = architecture.hidden_size, architecture.setting("expert_size")
    number = architecture.setting("num_experts")
    return {
        "mlp.gate.weight": (number, hidden),
        "mlp.experts.gate_proj.weight": (number, inner, hidden),
        "mlp.experts.up_proj.weight": (number, inner, hidden),
        "mlp.experts.down_proj.weight": (number, hidden, inner),
        "mlp.experts.down_proj.bias": (number, hidden),
    }


shapes = partial(tensor_shapes.shapes, gated=True, biased_norms=False, of_mlp=_experts)

HUGGING_FACE = (
    HFFormat(
        model_type="mixture",
        class_name="MixtureForCausalLM",
        keys={
            **same_keys("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            **same_keys("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
            **same_keys("rms_norm_eps", "tie_word_embeddings", "initializer_range"),
            "expert_size": ("moe_intermediate_size",),
            "num_experts": ("num_local_experts", "num_experts"),
        },
        implied={"position_embedding": "rotary"},
        names={
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.experts.gate_proj": "block_sparse_moe.experts.{}.w1",
            "mlp.experts.up_proj": "block_sparse_moe.experts.{}.w3",
            "mlp.experts.down_proj": "block_sparse_moe.experts.{}.w2",
        },
    ),
)
