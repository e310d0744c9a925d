"""The family biencoder equals two of transformers' MegatronBertModel and torch's projections."""

from typing import Any

import pytest
import torch

from tests.support.biencoders import (
    ARCHITECTURES,
    Oracle,
    biencoder,
    in_batch_loss,
    inputs_of,
    pairs,
    their_vectors,
    vectors,
)
from tests.support.hf_folder import from_hf
from tests.support.model_steps import assert_same_step
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture
from tokamake.config.parallel import ParallelSettings
from tokamake.errors import UserError
from tokamake.models.common.language_model import DropoutRates

PLAIN = ARCHITECTURES["biencoder-plain"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vectors_loss_gradients_and_a_step_equal_transformers(name: str) -> None:
    architecture = ARCHITECTURES[name]
    oracle = Oracle(architecture)
    model = to_model(architecture, from_hf(architecture, dict(oracle.named_parameters())))
    texts = pairs(architecture, number=4, length=33)
    ours, theirs = vectors(model, texts), their_vectors(oracle, texts)
    for own, expected in zip(ours, theirs, strict=True):
        assert (own - expected).abs().max() <= 1e-5
    losses = in_batch_loss(ours), in_batch_loss(theirs)
    assert_same_step(architecture, model, oracle=oracle, losses=losses)


def test_each_text_has_masks_of_its_own_and_the_same_ones_each_time() -> None:
    shared = biencoder(shared_towers=True)
    model: Any = to_model(shared, random_tensors(shared, 1))
    texts = pairs(shared, number=2, length=20)
    texts = texts._replace(blocks=texts.queries, block_padding=texts.query_padding)
    tokens, further = inputs_of(texts)
    with torch.no_grad():
        queries, blocks = vectors(model, texts)
        assert torch.equal(queries, blocks)
        model.dropout_rates = DropoutRates(hidden=0.1, attention=0.1, embedding=0.1, seed=1)
        numbers = torch.tensor([3, 4])
        first, again = (model(tokens, **further, sample_numbers=numbers) for _ in range(2))
    assert torch.equal(first.query_embeddings, again.query_embeddings)
    assert not torch.equal(first.query_embeddings, queries)
    assert not torch.equal(first.query_embeddings, first.block_embeddings)


def test_layers_are_numbered_one_tower_after_the_other() -> None:
    model: Any = to_model(PLAIN, random_tensors(PLAIN, 1))
    assert PLAIN.num_layers == len(model.blocks) == 6
    assert [layer.self_attn.number for layer in model.blocks] == [*range(6)]
    assert model.layer_number("context_model.layers.1.mlp.up_proj.weight") == 4
    assert model.layer_number("query_model.embed_tokens.weight") is None
    assert biencoder(shared_towers=True).num_layers == 3


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"pipeline_parallel_size": 2}, "of one stack of layers, and biencoder has two towers; se"),
        ({"context_parallel_size": 2}, "causal attention, and biencoder attends in both direc"),
    ],
)
def test_ranks_cannot_divide_towers_or_texts(layout: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ParallelSettings(**layout).check_architecture(PLAIN, 64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act: 'silu': biencoder has gelu or gelu_new"),
        ({"shared_towers": 1.5}, "shared_towers: 1.5: biencoder has False or True only"),
        ({"projection_dim": "wide"}, "projection_dim: 'wide': needs a value of type int"),
        ({"sentence_order_head": True}, "sentence_order_head"),
    ],
)
def test_settings_that_towers_lack_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Architecture(**{**PLAIN.model_dump(), **values})
