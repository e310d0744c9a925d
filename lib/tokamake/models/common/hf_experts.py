"""Model types of transformers with experts: the fields and keys that several have in common."""

from collections.abc import Mapping
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import hf_rope
from tokamake.models.common.hf_format import EXPERT_NAMES, GATED_KEYS, HFFormat, same_keys

KEYS = {
    **{name: keys for name, keys in GATED_KEYS.items() if name != "head_dim"},
    **same_keys(
        *("attention_bias", "moe_intermediate_size", "num_experts_per_tok", "n_shared_experts"),
        *("first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob"),
        "routed_scaling_factor",
    ),
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts"),
}
"""`HFFormat.keys` of types with shared experts."""
LATENT_KEYS = {
    **KEYS,
    **same_keys("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}
"""The same for types with latent attention."""
LATENT_DEFAULTS = {
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""`HFFormat.defaults` of types with latent attention."""
MTP_KEYS = same_keys("num_nextn_predict_layers")
"""Key of types with layers that predict further tokens; transformers takes a missing one for 1."""


def expert_format(
    model_type: str,
    class_name: str,
    *,
    defaults: Mapping[str, Any],
    implied: Mapping[str, Any] | None = None,
    **differences: Any,
) -> HFFormat:
    """A type with RMSNorms and experts; `differences` are other fields of `HFFormat`."""
    return HFFormat(
        model_type=model_type,
        class_name=class_name,
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            **defaults,
        },
        implied={"position_embedding": "rotary", **(implied or {})},
        dropout={"attention_dropout": "attention"},
        **{"names": EXPERT_NAMES, **differences},
    )


def expert_keys(*names: str, number: str = "num_experts") -> dict[str, tuple[str, ...]]:
    """`HFFormat.keys` of types without shared experts; `number`: key of the number of experts."""
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[number]
    return GATED_KEYS | same_keys(*names) | {"num_experts": (number, other)}


def with_floats(values: Mapping[str, Any]) -> dict[str, Any]:
    """`HFFormat.extra_fields`: files may state a whole number."""
    return {"routed_scaling_factor": float(values["routed_scaling_factor"])}


def latent_problem(config: Mapping[str, Any]) -> str | None:
    """`HFFormat.problem` of latent attention: transformers scales scores with any stretch."""
    parameters = hf_rope.rope_parameters(config)[0]
    kind = hf_rope.rope_type(parameters)
    if kind in ("default", "yarn") or not (stated := parameters.get("mscale_all_dim")):
        return None
    return (
        f"{hf_rope.rope_key(config)}.mscale_all_dim: {stated!r} is not supported with rope_type "
        f"{kind}; choose a model with yarn"
    )


def latent_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """`HFFormat.extra_fields` of latent attention: null is 0: queries have none."""
    return {
        **with_floats(values),
        "q_lora_rank": values.get("q_lora_rank", 1536) or 0,
        "head_dim": values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
    }


def latent_keys(architecture: Architecture) -> dict[str, Any]:
    """The inverse of `latent_fields`; transformers states the part of a head that rotates."""
    return {
        "q_lora_rank": architecture.setting("q_lora_rank") or None,
        "head_dim": architecture.setting("qk_rope_head_dim"),
    }
