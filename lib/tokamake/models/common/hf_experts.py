"""Keys of config.json that model types with shared experts have, and their values."""

from collections.abc import Mapping
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.hf_format import GATED_KEYS, same_keys

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
MTP_KEYS = same_keys("num_nextn_predict_layers")
"""Key of types with layers that predict further tokens; transformers takes a missing one for 1."""


def with_floats(values: Mapping[str, Any]) -> dict[str, Any]:
    """`HFFormat.extra_fields`: files may state a whole number."""
    return {"routed_scaling_factor": float(values["routed_scaling_factor"])}


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
