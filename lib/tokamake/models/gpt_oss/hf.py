"""How a `gpt_oss` is stored: its tensors, and transformers' model type gpt_oss."""

from collections.abc import Mapping
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_experts import expert_format, expert_keys
from tokamake.models.common.hf_format import same_keys
from tokamake.models.common.hf_windows import Windows

shapes = tensor_shapes.expert_shapes

_OWN = ("attention_bias", "swiglu_alpha", "swiglu_limit")
_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""Rotary positions of a config that states none, as in transformers."""


_USUAL_CHOSEN = 4
"""num_experts_per_tok of a config without it."""


def _problem(config: Mapping[str, Any]) -> str | None:
    # The hub's files state the number of chosen experts twice; transformers reads one key.
    chosen, again = config.get("num_experts_per_tok"), config.get("experts_per_token")
    if again in (None, chosen or _USUAL_CHOSEN):
        return None
    return f"experts_per_token: {again!r}: num_experts_per_tok is {chosen!r}; give both one value"


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: float(config[name]) for name in ("swiglu_alpha", "swiglu_limit")}
    if config.get("rope_scaling") or config.get("rope_parameters"):
        return fields
    return {**fields, "rope_scaling": _SCALING}


def _own_keys(architecture: Architecture) -> dict[str, Any]:
    chosen = architecture.setting("num_experts_per_tok")
    keys = {"head_dim": architecture.head_dim, "experts_per_token": chosen}
    # transformers 4 takes a missing key for its default, which stretches positions.
    return keys if architecture.rope_scaling else {**keys, "rope_scaling": None}


HUGGING_FACE = (
    expert_format(
        "gpt_oss",
        "GptOssForCausalLM",
        keys={
            **expert_keys(*_OWN, number="num_local_experts"),
            **same_keys("num_experts_per_tok"),
        },
        defaults={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "num_experts": 128,
            "num_experts_per_tok": _USUAL_CHOSEN,
        },
        implied={
            "attention_sinks": True,
            "mlp_bias": True,
            "norm_topk_prob": True,
        },
        windows=Windows(128, interval=2),
        problem=_problem,
        extra_fields=_fields,
        extra_keys=_own_keys,
        names={"mlp.gate": "mlp.router"},
        interleaves_experts=True,
    ),
)
