"""Tiny Retros for tests: shapes, samples with neighbors, and losses."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.model_loss import mean_loss
from tokamake.config.architecture import Architecture

CHUNK_LENGTH, NUM_NEIGHBORS = 4, 2


def retro(**values: Any) -> Architecture:
    """A shape with 4 heads and 4 layers; the second and the fourth attend to neighbors."""
    usual = {
        "vocab_size": 132,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "chunk_length": CHUNK_LENGTH,
        "first_retrieval_layer": 2,
        "retrieval_interval": 2,
    }
    return Architecture(family="retro", **(usual | values))


ARCHITECTURES = {
    "retro-gpt": retro(decoder="gpt"),
    "retro-llama": retro(decoder="llama", final_norm=False, num_encoder_layers=1),
}
GROUPED = retro(decoder="llama", num_key_value_heads=2)


def neighbors_of(architecture: Architecture, tokens: Tensor, *, seed: int = 3) -> dict[str, Tensor]:
    """Random neighbors of each chunk; some are short, some are missing, one chunk has none."""
    assert architecture.vocab_size is not None
    length = architecture.setting("chunk_length")
    rows, chunks = tokens.shape[0], tokens.shape[1] // length
    generator = np.random.default_rng(seed)
    shape = rows, chunks, NUM_NEIGHBORS, 2 * length
    found = generator.integers(architecture.vocab_size, size=shape)
    counts = generator.integers(0, 2 * length + 1, size=shape[:-1])
    counts[0, 0], counts[0, 1] = 2 * length, 0
    found[np.arange(2 * length) >= counts[..., None]] = 0
    return {
        "neighbor_tokens": torch.from_numpy(found),
        "num_neighbor_tokens": torch.from_numpy(counts),
    }


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Mean loss of tokens (B, C × m + 1) whose chunks have neighbors."""
    return mean_loss(model, tokens, **neighbors_of(model.architecture, tokens[:, :-1]))
