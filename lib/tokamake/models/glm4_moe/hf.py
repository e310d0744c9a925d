"""How a `glm4_moe` is stored: its tensors, and transformers' model type glm4_moe."""

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_experts import KEYS, MTP_KEYS, expert_format, with_floats
from tokamake.models.common.hf_format import same_keys


def shapes(architecture: Architecture) -> tensor_shapes.Shapes:
    """Shape of every tensor by its name."""
    own = architecture.setting
    form = tensor_shapes.LayerForm(qkv_bias=own("qkv_bias"))
    if own("use_qk_norm"):
        form = form._replace(of_attention=tensor_shapes.head_norms)
    return tensor_shapes.expert_shapes(architecture, form=form)


_KEYS = {name: keys for name, keys in KEYS.items() if name != "attention_bias"}

HUGGING_FACE = (
    expert_format(
        "glm4_moe",
        "Glm4MoeForCausalLM",
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
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
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
        extra_fields=with_floats,
        extra_keys=lambda architecture: {"head_dim": architecture.head_dim},
        partial_rotary="partial_rotary_factor",
        has_mtp_layers=True,
    ),
)

REFUSED = {"dots1": "its layers can have a window"}
