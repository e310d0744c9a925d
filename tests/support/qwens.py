"""Tiny Qwen3 models for tests: our shapes, and transformers' models of the same shape."""

from typing import Any

import torch

from tests.support.random_tensors import randomized
from tokamake.config.architecture import Architecture


def qwen3(**values: Any) -> Architecture:
    """A shape with 4 heads of width 24, wider together than the residual stream."""
    shape = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 64,
        "rope_theta": 5000.0,
    }
    return Architecture(family="qwen3", **(shape | values))


ARCHITECTURES = {
    "qwen3": qwen3(),
    "qwen3-tied": qwen3(tie_word_embeddings=True, vocab_size=128),
    "qwen3-even": qwen3(head_dim=None, num_key_value_heads=4, rms_norm_eps=1e-5),
    "qwen3-mqa": qwen3(
        num_key_value_heads=1,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
}


def reference(architecture: Architecture) -> Any:
    """transformers' model with random weights, norms included."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    values = architecture.model_dump(exclude={"family", "rope_theta", "rope_scaling"})
    rope = {"rope_type": "default", "rope_theta": architecture.rope_theta}
    if architecture.rope_scaling:
        rope |= architecture.rope_scaling.model_dump(exclude_none=True)
    values["head_dim"] = architecture.head_dim
    model = Qwen3ForCausalLM(Qwen3Config(**values, rope_parameters=rope))
    return randomized(model)
