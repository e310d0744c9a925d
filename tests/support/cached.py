"""Passes of a model with a cache of keys and values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamake.models.common.key_value_cache import KeyValueCache
from tokamake.models.common.language_model import LanguageModel


@torch.no_grad()
def extended(
    model: LanguageModel,
    cache: KeyValueCache,
    tokens_BL: Tensor,
    counts: Sequence[int] | None = None,
    **options: object,
) -> Tensor:
    """Extend rows of a cache; return the logits (B, L, V) of all new tokens, 0 for padding.

    `counts`: new tokens of each row, the rest is padding; None: all.
    """
    rows, width = tokens_BL.shape
    counts = counts or [width] * rows
    every = [range(count) for count in counts]
    options = {"predicting": every, "device": tokens_BL.device, **options}
    this = cache.begin(counts, width, **options)  # type: ignore[arg-type]
    predicted = model(tokens_BL, cache)
    cache.end()
    logits = predicted.new_zeros(rows, width, predicted.shape[-1])
    logits[this.predicting_places] = predicted
    return logits


def decoded(model: LanguageModel, tokens_BL: Tensor, steps: Sequence[int]) -> Tensor:
    """Logits of all tokens, computed in several passes."""
    cache = model.new_cache(*tokens_BL.shape)
    parts = [extended(model, cache, part) for part in tokens_BL.split([*steps], dim=1)]
    assert cache.lengths == [tokens_BL.shape[1]] * len(tokens_BL)
    return torch.cat(parts, dim=1)
