"""Checks of the settings of latent attention (MLA, arXiv 2405.04434)."""

from collections.abc import Mapping
from typing import Any, Protocol

_RANKS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class _Heads(Protocol):
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def latent_head_dim(own: Mapping[str, Any]) -> int:
    """Width of a query head: a part without positions, and a part that rotates."""
    return int(own["qk_nope_head_dim"]) + int(own["qk_rope_head_dim"])


def check_latent_attention(own: Mapping[str, Any], heads: _Heads) -> None:
    """Check a family's own settings; a ValueError names the first one that is impossible."""
    for name in _RANKS:
        if own[name] < 1:
            raise ValueError(f"{name}: {own[name]}: too small; give 1 or more")
    if own["q_lora_rank"] < 0:
        raise ValueError(f"q_lora_rank: {own['q_lora_rank']}: too small; give 0 or more")
    if own["qk_rope_head_dim"] % 2:
        raise ValueError(f"qk_rope_head_dim: {own['qk_rope_head_dim']}: is odd; rotary needs pairs")
    if heads.head_dim != (width := latent_head_dim(own)):
        raise ValueError(
            f"head_dim: {heads.head_dim}: is the sum of qk_nope_head_dim and qk_rope_head_dim, "
            f"{width}; remove it"
        )
    if heads.num_key_value_heads != heads.num_attention_heads:
        raise ValueError(
            f"num_key_value_heads: {heads.num_key_value_heads}: heads share one latent vector, and "
            f"each has its own keys and values; give {heads.num_attention_heads}, or remove it"
        )
