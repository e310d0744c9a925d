"""Small architectures of every family, and their random weights."""

from typing import Any

import torch
from torch import Tensor, nn

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.config.architecture import Architecture

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32,
}
GPT = {**SHAPE, "family": "gpt"}
FAMILIES = {
    "llama": Architecture(**SHAPE),
    "llama-tied": Architecture(**{**SHAPE, "tie_word_embeddings": True, "vocab_size": 128}),
    "llama-gqa": Architecture(**{**SHAPE, "num_key_value_heads": 2}),
    "llama-mqa": Architecture(**{**SHAPE, "num_key_value_heads": 1, "vocab_size": 1025}),
    "gpt2": Architecture(**GPT),
    "gpt2-untied": Architecture(**{**GPT, "tie_word_embeddings": False}),
    "gpt_bigcode": Architecture(
        **{**GPT, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}
    ),
    "bloom": Architecture(
        **{
            **GPT,
            "position_embedding": "alibi",
            "embedding_layernorm": True,
            "intermediate_size": 256,
        }
    ),
}


def weights(architecture: Architecture, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random weights; all rows differ, in biases and norms too."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(tuple(shape), generator=generator).to(dtype)
        for name, shape in model_tensors.shapes(architecture).items()
    }


def assert_same(checkpoint: Checkpoint, expected: Architecture) -> None:
    assert checkpoint.architecture == expected
    known = weights(expected)
    assert {*checkpoint.source} == {f"model.{name}" for name in known}
    for name, tensor in known.items():
        assert torch.equal(checkpoint.source.read(f"model.{name}"), tensor), name
        assert checkpoint.source.dtype(f"model.{name}").torch == tensor.dtype


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by their names in checkpoints, without copying."""
    rename = type(model).tensor_name
    return {rename(name): tensor for name, tensor in model.state_dict().items()}


def family_of(value: Any) -> str | None:
    """Test id of an architecture; other values have the usual one."""
    return value.family if isinstance(value, Architecture) else None


def changed_settings(value: Any) -> str | None:
    """Test id of an architecture, or of settings that a row changes."""
    return "-".join(value) if isinstance(value, dict) else family_of(value) or ""
