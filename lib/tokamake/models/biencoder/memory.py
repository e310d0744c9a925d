"""Memory and arithmetic of a `biencoder`, by tokens of the query: the block has as many."""

from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import costs


def saved_activations(architecture: Architecture, **sizes: Any) -> costs.SavedActivations:
    """Bytes per token of a layer; a shared tower's layers also save those of the block."""
    kept = costs.plain_layer(architecture, **sizes)
    num_texts = 2 if architecture.setting("shared_towers") else 1
    return costs.SavedActivations(*(num_texts * each for each in kept))


def flops_per_token(architecture: Architecture, sequence_length: int) -> int:
    """Floating-point operations of a token of the query and of one of the block, both ways.

    Projections and scores, products per sample, are left out.
    """
    tower = costs.flops_per_token(architecture, sequence_length, num_mlp_matrices=2)
    assert architecture.vocab_size is not None
    return 2 * (tower - 3 * 2 * architecture.hidden_size * architecture.vocab_size)
