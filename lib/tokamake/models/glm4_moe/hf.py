"""How a `glm4_moe` is stored: its tensors, and transformers' model type glm4_moe."""

from functools import partial

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_experts import KEYS, MTP_KEYS, with_floats
from tokamake.models.common.hf_format import EXPERT_NAMES, HFFormat, same_keys


def shapes(architecture: Architecture) -> tensor_shapes.Shapes:
    """Shape of every tensor by its name."""
    own = architecture.setting
    form = tensor_shapes.LayerForm(qkv_bias=own("qkv_bias"))
    if own("use_qk_norm"):
        form = form._replace(of_attention=tensor_shapes.head_norms)
    return tensor_shapes.shapes(
        architecture,
        gated=True,
        biased_norms=False,
        form=form,
        of_mlp=partial(tensor_shapes.expert_mlp, balanced=True),
    )


_KEYS = {name: keys for name, keys in KEYS.items() if name != "attention_bias"}

HUGGING_FACE = (
    HFFormat(
        model_type="glm4_moe",
        class_name="Glm4MoeForCausalLM",
        keys={
            **_KEYS,
            **MTP_KEYS,
            **same_keys("head_dim", "use_qk_norm"),
            "qkv_bias": ("attention_bias",),
        },
        defaults={
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "hidden_act": "silu",
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "qkv_bias": False,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        extra_fields=with_floats,
        extra_keys=lambda architecture: {"head_dim": architecture.head_dim},
        partial_rotary="partial_rotary_factor",
        names=EXPERT_NAMES,
        has_mtp_layers=True,
    ),
)
