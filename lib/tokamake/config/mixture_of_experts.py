"""Checks of the settings of mixtures of experts."""

import math
from collections.abc import Mapping
from typing import Any

_COUNTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")
_FIRST_DENSE = "first_k_dense_replace"


def check_experts(own: Mapping[str, Any], *, num_layers: int) -> None:
    """Check a family's own settings; a ValueError names the first one that is impossible."""
    for name in _COUNTS:
        if own.get(name, 1) < 1:
            raise ValueError(f"{name}: {own[name]}: too small; give 1 or more")
    number, chosen = own["num_experts"], own["num_experts_per_tok"]
    if chosen > number:
        raise ValueError(
            f"num_experts_per_tok: {chosen}: more than the {number} of num_experts; lower it"
        )
    for name in (_FIRST_DENSE, "n_shared_experts", "num_nextn_predict_layers"):
        if own.get(name, 0) < 0:
            raise ValueError(f"{name}: {own[name]}: too small; give 0 or more")
    for name in ("swiglu_alpha", "swiglu_limit", "routed_scaling_factor"):
        if not 0 < own.get(name, 1.0) < math.inf:
            raise ValueError(f"{name}: {own[name]}: not a positive number; give one")
    if own.get(_FIRST_DENSE, 0) >= num_layers:
        raise ValueError(
            f"{_FIRST_DENSE}: {own[_FIRST_DENSE]}: none of the {num_layers} layers would have "
            f"experts; give at most {num_layers - 1}"
        )
    if "n_group" in own:
        _check_groups(own["n_group"], own["topk_group"], number=number, chosen=chosen)


def _check_groups(groups: int, chosen_groups: int, *, number: int, chosen: int) -> None:
    if number % groups:
        raise ValueError(f"n_group: {groups}: does not divide the {number} of num_experts")
    if chosen_groups > groups:
        raise ValueError(
            f"topk_group: {chosen_groups}: more than the {groups} of n_group; lower it"
        )
    if chosen > (most := chosen_groups * number // groups):
        raise ValueError(
            f"num_experts_per_tok: {chosen}: {chosen_groups} groups have {most} experts; lower it"
        )
