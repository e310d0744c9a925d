"""Layers of a `retro` that attend to neighbors."""

from collections.abc import Mapping
from typing import Any

RETRIEVAL_SETTINGS = (
    *("chunk_length", "first_retrieval_layer", "retrieval_interval", "num_encoder_layers"),
)
"""Settings of a `retro` that are counts."""


def published_retrieval_layer(num_layers: int) -> int:
    """First layer of a `retro` that attends to neighbors, as Megatron counts, from 1 on."""
    return 6 if num_layers <= 15 else 9


def retrieval_layers(own: Mapping[str, Any], num_layers: int) -> range:
    """Indices of the layers that attend to neighbors, by a family's own settings."""
    first = own["first_retrieval_layer"] or published_retrieval_layer(num_layers)
    return range(first - 1, num_layers, own["retrieval_interval"])


def check_retrieval_layers(own: Mapping[str, Any], num_layers: int) -> None:
    """Raise ValueError if a count is too small, or if no layer attends to neighbors."""
    for name in RETRIEVAL_SETTINGS:
        if own[name] < (least := 0 if name == "first_retrieval_layer" else 1):
            raise ValueError(f"{name}: {own[name]}: too small; give {least} or more")
    if not retrieval_layers(own, num_layers):
        raise ValueError(
            f"first_retrieval_layer: {own['first_retrieval_layer']}: none of the {num_layers} "
            "layers would attend to neighbors: Retro's first one is layer "
            f"{published_retrieval_layer(num_layers)}; give 1 to {num_layers}"
        )
