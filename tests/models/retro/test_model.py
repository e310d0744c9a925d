"""Which tokens of a retro see which neighbors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.model_ranks import tokens_of
from tests.support.random_tensors import random_tensors
from tests.support.retros import ARCHITECTURES, CHUNK_LENGTH, GROUPED, neighbors_of, retro
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.models.common.language_model import DropoutRates

SHAPES = [*ARCHITECTURES.values(), GROUPED]
LENGTH = 4 * CHUNK_LENGTH


def model_of(architecture: Architecture) -> Any:
    """A model whose parameters all matter, biases too."""
    generator = torch.Generator().manual_seed(0)
    tensors = random_tensors(architecture, 1)
    for tensor in tensors.values():
        tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return to_model(architecture, tensors)


@torch.no_grad()
def logits(model: Any, tokens: Tensor, neighbors: dict[str, Tensor], **further: Tensor) -> Tensor:
    result: Tensor = model(tokens, **neighbors, **further)
    return result


def changed(first: Tensor, second: Tensor) -> list[list[int]]:
    """Positions in each row that differ."""
    return [row.nonzero().flatten().tolist() for row in (first != second).any(-1)]


@pytest.mark.parametrize("architecture", SHAPES, ids=lambda a: a.setting("decoder"))
def test_neighbors_reach_from_the_last_token_of_their_chunk_on(architecture: Architecture) -> None:
    model, tokens = model_of(architecture), tokens_of(architecture, LENGTH)
    neighbors = neighbors_of(architecture, tokens)
    neighbors["num_neighbor_tokens"][:] = 2 * CHUNK_LENGTH
    before = logits(model, tokens, neighbors)
    for chunk in range(4):
        other = {name: tensor.clone() for name, tensor in neighbors.items()}
        other["neighbor_tokens"][1, chunk, 1, 2] += 1
        reached = range(chunk * CHUNK_LENGTH + CHUNK_LENGTH - 1, LENGTH)
        assert changed(before, logits(model, tokens, other)) == [[], [*reached]]


@pytest.mark.parametrize("architecture", SHAPES, ids=lambda a: a.setting("decoder"))
def test_a_token_changes_nothing_before_it(architecture: Architecture) -> None:
    model, tokens = model_of(architecture), tokens_of(architecture, LENGTH)
    neighbors, other = neighbors_of(architecture, tokens), tokens.clone()
    other[0, 6] = (other[0, 6] + 1) % 100
    before, after = logits(model, tokens, neighbors), logits(model, other, neighbors)
    assert (changed(before, after)[0][0], changed(before, after)[1]) == (6, [])


def test_fill_and_missing_neighbors_are_not_seen() -> None:
    architecture = ARCHITECTURES["retro-gpt"]
    model, tokens = model_of(architecture), tokens_of(architecture, LENGTH)
    neighbors = neighbors_of(architecture, tokens)
    counts = neighbors["num_neighbor_tokens"]
    other = {name: tensor.clone() for name, tensor in neighbors.items()}
    is_fill = torch.arange(2 * CHUNK_LENGTH) >= counts[..., None]
    other["neighbor_tokens"][is_fill] = 99
    assert torch.equal(logits(model, tokens, neighbors), logits(model, tokens, other))
    # A chunk without neighbors is as in a model without them, and has finite gradients.
    counts[:] = 0
    assert torch.equal(logits(model, tokens, neighbors), logits(model, tokens, {}))
    model.requires_grad_()
    model(tokens, **neighbors).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_neighbors_are_a_set() -> None:
    architecture = ARCHITECTURES["retro-llama"]
    model, tokens = model_of(architecture), tokens_of(architecture, LENGTH)
    neighbors = neighbors_of(architecture, tokens)
    other = {name: tensor.flip(2) for name, tensor in neighbors.items()}
    torch.testing.assert_close(
        logits(model, tokens, neighbors), logits(model, tokens, other), atol=1e-5, rtol=1e-5
    )


def test_masks_of_dropout_follow_from_the_number_of_a_sample() -> None:
    architecture = retro(decoder="gpt", encoder_hidden_dropout=0.3, encoder_attention_dropout=0.3)
    model, tokens = model_of(architecture), tokens_of(architecture, LENGTH)
    neighbors, numbers = neighbors_of(architecture, tokens), torch.tensor([3, 8])
    plain = logits(model, tokens, neighbors)
    assert model.has_own_dropout
    model.dropout_rates = DropoutRates(0.0, 0.0, 0.0, seed=1)  # the encoder has its own
    first = logits(model, tokens, neighbors, sample_numbers=numbers)
    assert changed(first, plain)[0][0] == CHUNK_LENGTH - 1
    of_second = {name: tensor[1:] for name, tensor in neighbors.items()}
    alone = logits(model, tokens[1:], of_second, sample_numbers=numbers[1:])
    torch.testing.assert_close(alone, first[1:], atol=1e-5, rtol=1e-5)
    model.dropout_rates = DropoutRates(0.1, 0.1, 0.1, seed=1)
    assert changed(logits(model, tokens, neighbors, sample_numbers=numbers), first)[0][0] == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decoder": "bert"}, "decoder: 'bert': retro has llama or gpt only"),
        ({"decoder": "llama", "hidden_act": "gelu"}, "hidden_act: 'gelu': retro has silu only"),
        ({"decoder": "gpt", "rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06: retro does not know it"),
        ({"first_retrieval_layer": 0}, "none of the 4 layers .* layer 6; give 1 to 4"),
        ({"first_retrieval_layer": 5}, "first_retrieval_layer: 5: none of the 4 layers would"),
        ({"first_retrieval_layer": -1}, "first_retrieval_layer: -1: too small; give 0 or more"),
        ({"chunk_length": 0}, "chunk_length: 0: too small; give 1 or more"),
        ({"chunk_length": "long"}, "chunk_length: 'long': needs a value of type int"),
        ({"neighbors": 2}, "neighbors"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    shape = {
        "family": "retro",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "first_retrieval_layer": 2,
    }
    with pytest.raises(UserError, match=message):
        validate(Architecture, shape | values, "x.yaml")


def test_layers_that_attend_to_neighbors_are_megatrons() -> None:
    numbers = {
        number: [
            layer + 1 for layer in retro(
                num_hidden_layers=number, first_retrieval_layer=0, retrieval_interval=3
            ).retrieval_layers
        ]
        for number in (6, 12, 15, 16, 32)
    }  # fmt: skip
    assert numbers[6] == [6]
    assert numbers[12] == [6, 9, 12]
    assert numbers[15] == [6, 9, 12, 15]
    assert numbers[16] == [9, 12, 15]
    assert numbers[32] == [9, 12, 15, 18, 21, 24, 27, 30]
