"""How a `deepseek_v2` is stored: its tensors, and transformers' model type deepseek_v2."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_experts import (
    LATENT_DEFAULTS,
    LATENT_KEYS,
    expert_format,
    latent_fields,
    latent_keys,
    latent_problem,
)

shapes = partial(
    tensor_shapes.expert_shapes,
    form=tensor_shapes.LayerForm(attention=tensor_shapes.latent_attention),
)

_GREEDY, _BY_GROUP = "greedy", "group_limited_greedy"
_GROUPS = ("n_group", "topk_group")


def _problem(config: Mapping[str, Any]) -> str | None:
    if config.get("num_experts_per_tok") is None:  # transformers has no default
        return "num_experts_per_tok: missing; add it"
    return latent_problem(config)


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
    expert_format(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        keys={name: keys for name, keys in LATENT_KEYS.items() if name != "norm_topk_prob"},
        defaults={
            **LATENT_DEFAULTS,
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1407,
            "num_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        supported={
            **{key: (value, None) for key, value in _CHOICE.items()},
            "mlp_bias": (False,),
            "topk_method": (_GREEDY, _BY_GROUP),
        },
        problem=_problem,
        constants=_CHOICE | {"mlp_bias": False},
        extra_fields=_fields,
        extra_keys=_keys,
    ),
)
