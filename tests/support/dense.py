"""Tiny dense causal models of awkward shapes, and transformers' models of the same shapes."""

from collections.abc import Callable
from typing import Any

import torch

from tests.support.random_tensors import randomized
from tokamake.config.architecture import Architecture


def dense(family: str, **values: Any) -> Architecture:
    """A shape with 6 heads of width 12, wider together than the residual stream, in 3 groups."""
    shape = {
        "vocab_size": 131,
        "hidden_size": 60,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "rope_theta": 5000.0,
    }
    return Architecture(family=family, **(shape | values))


TIED: dict[str, Any] = {"tie_word_embeddings": True, "vocab_size": 128, "num_key_value_heads": 1}
EVEN: dict[str, Any] = {"head_dim": None, "num_key_value_heads": 6, "rms_norm_eps": 1e-3}

ARCHITECTURES = {
    "mistral": dense("mistral"),
    "mistral-tied": dense("mistral", **TIED),
    "mistral-even": dense("mistral", **EVEN),
    "qwen2": dense("qwen2"),
    "qwen2-tied": dense("qwen2", **TIED),
    "qwen2-even": dense("qwen2", **EVEN),
}

FAMILIES = sorted({each.family for each in ARCHITECTURES.values()})


def _same(_: Architecture) -> dict[str, Any]:
    return {}


OWN_KEYS: dict[str, Callable[[Architecture], dict[str, Any]]] = {
    "mistral": lambda _: {"sliding_window": None},
}
"""Keys of transformers' config that have other names than our fields, by family."""


def reference(architecture: Architecture) -> Any:
    """transformers' model with random weights, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    own = {*(architecture.model_extra or {}), "family", "rope_theta", "rope_scaling"}
    values = architecture.model_dump(exclude=own)
    rope = {"rope_type": "default", "rope_theta": architecture.rope_theta}
    if architecture.rope_scaling:
        rope |= architecture.rope_scaling.model_dump(exclude_none=True)
    values |= {"head_dim": architecture.head_dim, "rope_parameters": rope}
    values |= OWN_KEYS.get(architecture.family, _same)(architecture)
    config = AutoConfig.for_model(architecture.family, **values)
    return randomized(AutoModelForCausalLM.from_config(config))
