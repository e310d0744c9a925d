"""Decoding with retrieval equals a pass over all tokens, whose neighbors are given."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.retro.test_model import SHAPES, logits, model_of
from tests.support.cached import decoded, extended
from tests.support.model_ranks import tokens_of
from tests.support.retros import ARCHITECTURES, CHUNK_LENGTH, NUM_NEIGHBORS
from tokamake.models.retro.cache import Numbers

LENGTH = 22
"""Five chunks, and two tokens."""


def retriever(chunks: Numbers) -> tuple[Numbers, Numbers]:
    """Random neighbors that depend on their chunk; some are short or missing."""
    assert chunks.shape[1:] == (CHUNK_LENGTH,)
    generators = [np.random.default_rng(chunk) for chunk in chunks]
    shape = (NUM_NEIGHBORS, 2 * CHUNK_LENGTH)
    tokens = np.stack([generator.integers(100, size=shape) for generator in generators])
    longest = 2 * CHUNK_LENGTH + 1
    counts = [generator.integers(0, longest, NUM_NEIGHBORS) for generator in generators]
    return tokens, np.stack(counts)


def expected_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits of a single pass without a cache."""
    filled = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % CHUNK_LENGTH))
    found = retriever(filled.numpy().reshape(-1, CHUNK_LENGTH))
    neighbors = {
        name: torch.from_numpy(array).unflatten(0, (len(filled), -1))
        for name, array in zip(("neighbor_tokens", "num_neighbor_tokens"), found, strict=True)
    }
    return logits(model, filled, neighbors)[:, : tokens.shape[1]]


@pytest.mark.parametrize("steps", [[22], [1] * 22, [3, 1, 1, 9, 8], [8, 4, 10]], ids=str)
@pytest.mark.parametrize("architecture", SHAPES, ids=lambda a: a.setting("decoder"))
def test_decoding_equals_a_single_pass(architecture: Any, steps: list[int]) -> None:
    model, tokens = model_of(architecture), tokens_of(architecture, LENGTH)
    expected = expected_logits(model, tokens)
    assert (expected - logits(model, tokens, {})).abs().max() > 0.1
    model.retriever = retriever
    torch.testing.assert_close(decoded(model, tokens, steps), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(model, tokens, {}), expected, atol=1e-5, rtol=1e-5)


def test_rows_of_different_lengths_move_and_continue() -> None:
    architecture = ARCHITECTURES["retro-llama"]
    model, tokens = model_of(architecture), tokens_of(architecture, LENGTH)
    expected = expected_logits(model, tokens)
    model.retriever = retriever
    cache = model.new_cache(3, LENGTH)
    extended(model, cache, tokens[:, :9], [9, 6])
    cache.move(1, 2)
    cache.clear(1)
    # Row 0 has 9 tokens, row 1 begins again, and row 2 continues the second text.
    texts = [tokens[0, 9:14], tokens[0, :5], tokens[1, 6:11]]
    got = extended(model, cache, torch.stack(texts))
    wanted = [expected[0, 9:14], expected[0, :5], expected[1, 6:11]]
    torch.testing.assert_close(got, torch.stack(wanted), atol=1e-5, rtol=1e-5)
    cache.reorder([2, 2, 0])
    texts = [tokens[1, 11:15], tokens[1, 11:15], tokens[0, 14:18]]
    got = extended(model, cache, torch.stack(texts), [4, 3, 4])
    wanted = [expected[1, 11:15], expected[1, 11:15], expected[0, 14:18]]
    for row, count in enumerate([4, 3, 4]):
        torch.testing.assert_close(got[row, :count], wanted[row][:count], atol=1e-5, rtol=1e-5)


def test_without_a_retriever_there_are_no_neighbors() -> None:
    model = model_of(ARCHITECTURES["retro-gpt"])
    tokens = tokens_of(model.architecture, LENGTH)
    expected = logits(model, tokens, {})
    torch.testing.assert_close(decoded(model, tokens, [9, 13]), expected, atol=1e-5, rtol=1e-5)
