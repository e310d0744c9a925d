"""Latent attention: what its cache keeps, and both ways to compute it."""

from typing import Any

import pytest
import torch

from tests.support.cached import decoded
from tests.support.dense import ARCHITECTURES
from tests.support.model_ranks import tokens_of
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.model_tensors import to_model
from tokamake.inference.layout import InferenceLayout
from tokamake.inference.memory import cache_bytes
from tokamake.models.common.latent_attention import LatentAttention

NAMES = ("deepseek_v3", "deepseek_v3-plain", "deepseek_v3-yarn")


def model_of(name: str) -> Any:
    # Attention of several times the usual weight; routers are as they are, far from ties.
    weights = {
        key: 4 * each if "self_attn" in key else each
        for key, each in random_tensors(ARCHITECTURES[name], 1).items()
    }
    return to_model(ARCHITECTURES[name], weights)


@torch.no_grad()
def test_the_cache_keeps_a_latent_vector_and_the_rotated_part_of_a_key() -> None:
    model, shape = model_of("deepseek_v3"), ARCHITECTURES["deepseek_v3"]
    cache = model.new_cache(1, 30)
    cache.begin([20], 20, device=torch.device("cpu"))
    model(tokens_of(shape, 20)[:1], cache)
    cache.end()
    kept = [tensor.shape for layer in cache.layers for tensor in layer.tensors]
    assert kept == [(1, 1, 30, 14), (1, 1, 30, 6)] * 3
    assert cache_bytes(shape, InferenceLayout(), num_tokens=10) == 3 * 10 * (14 + 6) * 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compressed", [False, True])
@torch.no_grad()
def test_scores_of_latent_vectors_equal_scores_of_keys(
    name: str, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = model_of(name), tokens_of(ARCHITECTURES[name], 24)
    expected = model(tokens)
    monkeypatch.setattr(LatentAttention, "_is_cheaper_compressed", lambda *_: compressed)
    found = decoded(model, tokens, [9, 1, 1, 13])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_long_passes_compute_keys_and_short_ones_do_not() -> None:
    attention = model_of("deepseek_v3").layers["0"].self_attn
    assert attention._is_cheaper_compressed(1)
    assert not attention._is_cheaper_compressed(200)
