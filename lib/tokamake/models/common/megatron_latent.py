"""Latent attention (MLA) in Megatron's terms: modules, arguments and rotary positions."""

import math
from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common.megatron_format import (
    ATTENTION,
    INPUT_NORM,
    MegatronModule,
    first,
    norm_epsilon,
    unsupported,
)

_OURS, _THEIRS = "self_attn", "self_attention"
# In the order in which megatron.core makes them with Transformer Engine; optimizers keep it.
LATENT_ATTENTION = (
    INPUT_NORM,
    ATTENTION[1],
    MegatronModule(f"{_THEIRS}.linear_q_proj", (f"{_OURS}.q_proj",), "rows"),
    MegatronModule(f"{_THEIRS}.linear_q_down_proj", (f"{_OURS}.q_a_proj",)),
    MegatronModule(f"{_THEIRS}.q_layernorm", (f"{_OURS}.q_a_layernorm",)),
    MegatronModule(f"{_THEIRS}.linear_q_up_proj", (f"{_OURS}.q_b_proj",), "rows"),
    MegatronModule(f"{_THEIRS}.linear_kv_down_proj", (f"{_OURS}.kv_a_proj_with_mqa",)),
    MegatronModule(f"{_THEIRS}.kv_layernorm", (f"{_OURS}.kv_a_layernorm",)),
    MegatronModule(f"{_THEIRS}.linear_kv_up_proj", (f"{_OURS}.kv_b_proj",), "rows"),
)
_WIDTHS = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Our settings and Megatron's arguments."""
_YARN = {
    "factor": ("rotary_scaling_factor", 40.0),
    "original_max_position_embeddings": ("original_max_position_embeddings", 4096),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""Our settings of rope_scaling, Megatron's arguments and their defaults in megatron.core."""
_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors here. Megatron's have the epsilon of all norms."""


def latent_fields(args: Any, file: Path, *, family: str) -> dict[str, Any]:
    """Fields of an `Architecture` that Megatron's arguments of latent attention state."""
    if norm_epsilon(args, is_core=True) != _EPSILON:
        name = "norm_epsilon" if first(args, "norm_epsilon") is not None else "layernorm_epsilon"
        meaning = f"norms of latent vectors with another epsilon than {_EPSILON:g}"
        raise unsupported(args, file, name=name, meaning=meaning, family=family)
    for name in _WIDTHS.values():
        if first(args, name) is None:
            meaning = "latent attention of an unknown width"
            raise unsupported(args, file, name=name, meaning=meaning, family=family)
    widths = {ours: getattr(args, theirs) for ours, theirs in _WIDTHS.items()}
    return {
        **widths,
        "q_lora_rank": first(args, "q_lora_rank") or 0,
        "head_dim": widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"],
        "rope_scaling": _scaling(args),
    }


def _scaling(args: Any) -> dict[str, Any] | None:
    """Scaling of rotary positions: megatron.core's default for latent attention is YaRN."""
    if first(args, "rope_type") == "rope":
        return None
    values = {
        ours: default if (value := first(args, theirs)) is None else value
        for ours, (theirs, default) in _YARN.items()
    }
    if values["factor"] <= 1:
        return None
    mscale, all_dims = values["mscale"], values["mscale_all_dim"]
    if not (mscale and all_dims):
        # Here as in transformers, neither counts for cosines and sines if the other is 0.
        values |= {"mscale": None, "mscale_all_dim": all_dims or None}
        if (mscale, all_dims) != (1, 0):
            log = 0.1 * math.log(values["factor"])
            values["attention_factor"] = (mscale * log + 1) / (all_dims * log + 1)
    return {"rope_type": "yarn", **values}


def latent_arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of latent attention; the inverse of `latent_fields`."""
    return {
        "q_lora_rank": architecture.setting("q_lora_rank") or None,
        **{theirs: architecture.setting(ours) for ours, theirs in _WIDTHS.items()},
        "rope_type": "rope",
        **latent_scaling(architecture),
    }


def latent_scaling(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments of a scaling of rotary positions; empty: it has none for it."""
    scaling = architecture.rope_scaling
    if not architecture.latent_size or scaling is None or scaling.rope_type != "yarn":
        return {}
    if scaling.attention_factor is not None or scaling.truncate is False:
        return {}
    if scaling.mscale_all_dim and not scaling.mscale:
        # Here it changes scores alone; in Megatron, cosines and sines, too.
        return {}
    stated = scaling.model_dump(exclude_none=True)
    if not scaling.mscale_all_dim:
        # Here as in transformers, mscale counts only beside it.
        stated |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    arguments = {theirs: stated.get(ours, default) for ours, (theirs, default) in _YARN.items()}
    return {"rope_type": "yarn", **arguments}


def inexpressible_latent(architecture: Architecture) -> list[str]:
    """Settings of latent attention for which Megatron-LM has no argument."""
    settings = []
    if (epsilon := architecture.rms_norm_eps) != _EPSILON:
        settings.append(f"rms_norm_eps {epsilon:g} beside norms of latent vectors with 1e-06")
    if not (architecture.model_extra or {}).get("rope_interleave", True):
        settings.append("rope_interleave False")
    return settings
