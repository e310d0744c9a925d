"""How a `deepseek_v2` is stored: its tensors, and transformers' model type deepseek_v2."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_experts import LATENT_KEYS, latent_fields, latent_keys
from tokamake.models.common.hf_format import EXPERT_NAMES, HFFormat

shapes = partial(
    tensor_shapes.shapes,
    gated=True,
    biased_norms=False,
    form=tensor_shapes.LayerForm(attention=tensor_shapes.latent_attention),
    of_mlp=tensor_shapes.expert_mlp,
)

_GREEDY, _BY_GROUP = "greedy", "group_limited_greedy"
_GROUPS = ("n_group", "topk_group")


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    if values.get("topk_method", _GREEDY) == _GREEDY:  # groups have no effect
        return {**latent_fields(values), **dict.fromkeys(_GROUPS, 1)}
    return latent_fields(values)


def _keys(architecture: Architecture) -> dict[str, Any]:
    is_greedy = architecture.setting("n_group") == 1
    return {**latent_keys(architecture), "topk_method": _GREEDY if is_greedy else _BY_GROUP}


# Settings of published files; transformers ignores the first three.
_CHOICE = {"scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False}

HUGGING_FACE = (
    HFFormat(
        model_type="deepseek_v2",
        class_name="DeepseekV2ForCausalLM",
        keys={name: keys for name, keys in LATENT_KEYS.items() if name != "norm_topk_prob"},
        defaults={
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 1407,
            "num_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        supported={
            **{key: (value, None) for key, value in _CHOICE.items()},
            "mlp_bias": (False,),
            "topk_method": (_GREEDY, _BY_GROUP),
        },
        constants=_CHOICE | {"mlp_bias": False},
        extra_fields=_fields,
        extra_keys=_keys,
        names=EXPERT_NAMES,
    ),
)
