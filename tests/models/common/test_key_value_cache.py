"""Sequences of different lengths in one cache: each gets the logits that it has alone."""

import pytest
import torch
from torch import Tensor

from tests.support.cached import extended
from tests.support.dense import ARCHITECTURES
from tests.support.families import FAMILIES
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture
from tokamake.models.common.language_model import LanguageModel

KINDS = {
    **{name: FAMILIES[name] for name in ("llama-gqa", "gpt2", "gpt_bigcode", "bloom")},
    **{
        name: ARCHITECTURES[name]
        for name in ("mistral-window", "gemma2-tied", "olmo3", "deepseek_v3")
    },
}
LENGTHS = (3, 9, 1, 6)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    architecture: Architecture = KINDS[request.param]
    return to_model(architecture, random_tensors(architecture, 1))


@pytest.fixture
def texts(model: LanguageModel) -> Tensor:
    """Four sequences of 20 tokens."""
    size = model.architecture.vocab_size
    assert size is not None
    return torch.randint(size, (4, 20), generator=torch.Generator().manual_seed(3))


def padded(texts: Tensor, begins: list[int], counts: list[int]) -> Tensor:
    """The next tokens of each sequence; padding is a token that exists."""
    rows = torch.full((len(counts), max(counts)), 7)
    for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        rows[row, :count] = texts[row, begin : begin + count]
    return rows


@torch.no_grad()
def test_rows_of_different_lengths_equal_the_full_forward(
    model: LanguageModel, texts: Tensor
) -> None:
    expected, cache, begins = model(texts), model.new_cache(4, 20), [0] * 4
    for counts in ([*LENGTHS], [1, 1, 1, 1], [2, 4, 1, 3], [1, 1, 1, 1]):
        logits = extended(model, cache, padded(texts, begins, counts), counts)
        for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            close(logits[row, :count], expected[row, begin : begin + count])
        begins = [begin + count for begin, count in zip(begins, counts, strict=True)]
        assert cache.lengths == begins


@torch.no_grad()
@pytest.mark.parametrize(
    "predicting", [None, [range(1, 3), range(0), range(1), range(2, 6)]], ids=["last", "chosen"]
)
def test_only_chosen_tokens_get_logits(
    model: LanguageModel, texts: Tensor, predicting: list[range] | None
) -> None:
    expected, cache, counts = model(texts), model.new_cache(4, 20), [*LENGTHS]
    tokens = padded(texts, [0] * 4, counts)
    cache.begin(counts, tokens.shape[1], device=tokens.device, predicting=predicting)
    logits = model(tokens, cache)
    chosen = predicting or [range(count - 1, count) for count in counts]
    close(logits, torch.cat([expected[row, [*columns]] for row, columns in enumerate(chosen)]))


@torch.no_grad()
def test_a_single_pass_keeps_nothing(model: LanguageModel, texts: Tensor) -> None:
    cache = model.new_cache(4, 20, is_kept=False)
    close(extended(model, cache, texts), model(texts))
    assert all(layer.tensors is None for layer in cache.layers)


@torch.no_grad()
def test_layers_with_a_window_keep_its_tokens_alone() -> None:
    shape = ARCHITECTURES["gemma2-tied"]  # every second layer has a window of 5
    model = to_model(shape, random_tensors(shape, 1))
    texts = torch.randint(128, (2, 20), generator=torch.Generator().manual_seed(3))
    expected, cache = model(texts), model.new_cache(2, 20)
    for start in range(20):
        close(extended(model, cache, texts[:, start : start + 1])[:, 0], expected[:, start])
    lengths = [layer.tensors[0].shape[2] for layer in cache.layers if layer.tensors]
    assert lengths == [5 if shape.window(number) else 20 for number in range(len(lengths))]
    assert {*lengths} == {5, 20}


@torch.no_grad()
def test_rows_begin_move_and_end_beside_others(model: LanguageModel, texts: Tensor) -> None:
    expected, cache = model(texts), model.new_cache(3, 20)
    extended(model, cache, texts[:2, :5])
    extended(model, cache, texts[2:3, :8], first=2)
    cache.move(2, 0)  # the first sequence ended
    cache.clear(2)
    extended(model, cache, texts[3:, :4], first=2)
    assert cache.lengths == [8, 5, 4]
    order, begins = [2, 1, 3], [8, 5, 4]
    tokens = torch.stack([texts[text, begin] for text, begin in zip(order, begins, strict=True)])
    logits = extended(model, cache, tokens[:, None])
    for row, (text, begin) in enumerate(zip(order, begins, strict=True)):
        close(logits[row, 0], expected[text, begin])


@torch.no_grad()
def test_reordered_rows_continue_other_sequences(model: LanguageModel, texts: Tensor) -> None:
    expected, cache = model(texts), model.new_cache(3, 20)
    extended(model, cache, texts[:3, :5])
    cache.reorder([2, 2, 0])
    logits = extended(model, cache, texts[[2, 2, 0], 5:6])
    for row, text in enumerate([2, 2, 0]):
        close(logits[row, 0], expected[text, 5])


def test_a_pass_beyond_the_capacity_is_a_mistake(model: LanguageModel, texts: Tensor) -> None:
    cache = model.new_cache(4, 6)
    extended(model, cache, texts[:, :5])
    with pytest.raises(AssertionError):
        extended(model, cache, texts[:, :2])
