"""The family bert equals transformers' MegatronBert, on any tensor-parallel ranks."""

import math
from typing import Any

import pytest
import torch
import transformers

from tests.support.berts import (
    ARCHITECTURES,
    MIXED,
    bert,
    inputs_of,
    masked_samples,
    mean_loss,
    reference,
    rows_of,
    tensors_of,
    their_loss,
    their_output,
)
from tests.support.hf_folder import from_hf, to_hf
from tests.support.model_steps import assert_same_step
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.model_tensors import shapes, to_model
from tokamake.config.architecture import Architecture
from tokamake.models.common.language_model import DropoutRates

PLAIN = ARCHITECTURES["bert"]


def model_with_weights_of(architecture: Architecture, oracle: Any) -> Any:
    """Our model with copies of the weights of transformers' model."""
    return to_model(architecture, from_hf(architecture, tensors_of(oracle)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_gradients_and_a_step_equal_transformers(name: str) -> None:
    architecture = ARCHITECTURES[name]
    oracle = reference(architecture)
    model = model_with_weights_of(architecture, oracle)
    samples = masked_samples(architecture, number=3, length=33)
    tokens, further = inputs_of(samples)
    with torch.no_grad():
        ours = model(tokens, **further)
        logits, order = their_output(oracle, samples)
    # Rows of padding are nobody's: Megatron's see nothing, transformers' see all tokens.
    valid = torch.from_numpy(samples.padding_mask)
    assert (ours.logits - logits)[valid].abs().max() <= 1e-5
    assert (ours.sample_logits is None) == (order is None)
    if order is not None:
        assert (ours.sample_logits - order).abs().max() <= 1e-5
    losses = mean_loss(model, samples), their_loss(oracle, samples)
    assert_same_step(architecture, model, oracle=oracle, losses=losses)


def test_the_two_activations_are_settings() -> None:
    """The head keeps its exact GELU where the MLPs have the tanh."""
    weights, samples = random_tensors(MIXED, 1), masked_samples(MIXED, number=2, length=20)
    tokens, further = inputs_of(samples)
    with torch.no_grad():
        mixed, exact, tanh = (
            to_model(bert(**acts), weights)(tokens, **further).logits
            for acts in (
                {"hidden_act": "gelu_new"},
                {},
                {"hidden_act": "gelu_new", "head_act": "gelu_new"},
            )
        )
    assert not torch.equal(mixed, exact)
    assert not torch.equal(mixed, tanh)


@pytest.mark.parametrize("length", [12, 40])
def test_tokens_see_later_tokens_but_no_padding(length: int) -> None:
    model = to_model(PLAIN, random_tensors(PLAIN, 1))
    tokens = torch.randint(131, (2, length), generator=torch.Generator().manual_seed(1))
    padding = (torch.arange(length) >= length - 5).expand(2, -1).long()
    with torch.no_grad():
        padded = model(tokens, document_ids=padding)
        short = model(tokens[:, : length - 5])
        changed = tokens.clone()
        changed[:, length - 6] += 1 - 2 * (changed[:, length - 6] == 130).long()
        later = model(changed[:, : length - 5])
    torch.testing.assert_close(padded.logits[:, : length - 5], short.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded.sample_logits, short.sample_logits, atol=1e-5, rtol=1e-5)
    assert (later.logits[:, 0] - short.logits[:, 0]).abs().max() > 1e-4


@pytest.mark.parametrize("length", [24, 80])
def test_packed_samples_equal_samples_alone(length: int) -> None:
    architecture = bert(max_position_embeddings=length)
    model = to_model(architecture, random_tensors(architecture, 1))
    tokens = torch.randint(131, (2, length), generator=torch.Generator().manual_seed(1))
    sizes = [length // 3, length - length // 3]
    in_row = (torch.arange(length) >= sizes[0]).long()
    documents = torch.stack((in_row, in_row + 2))
    places = torch.tensor([0, sizes[0], length, length + sizes[0]])
    with torch.no_grad():
        together = model(tokens, document_ids=documents, sample_places=places)
        first, second = (model(part) for part in tokens.split(sizes, dim=1))
    logits = torch.cat((first.logits, second.logits), dim=1)
    torch.testing.assert_close(together.logits, logits, atol=1e-5, rtol=1e-5)
    orders = torch.stack((first.sample_logits, second.sample_logits), dim=1).flatten(0, 1)
    torch.testing.assert_close(together.sample_logits, orders, atol=1e-5, rtol=1e-5)


def test_samples_that_mask_nothing_have_the_loss_of_their_order_alone() -> None:
    model = to_model(PLAIN, random_tensors(PLAIN, 1))
    nothing = rows_of(masked_samples(PLAIN, number=3, length=20), slice(1, 2))
    loss = mean_loss(model, nothing)
    assert loss.item() == pytest.approx(math.log(2), abs=0.2)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("head", "classes"), [("classes", 3), ("classes", 1), ("choice", 1)])
def test_logits_of_a_task_equal_those_of_transformers(head: str, classes: int) -> None:
    architecture = bert(task_head=head, num_classes=classes, sentence_order_head=False)
    weights = random_tensors(architecture, 3)
    assert {*weights} == {*shapes(architecture)}
    config = reference(PLAIN).config
    config.num_labels = classes
    name = {"classes": "SequenceClassification", "choice": "MultipleChoice"}[head]
    oracle = getattr(transformers, f"MegatronBertFor{name}")(config).eval()
    oracle.load_state_dict(to_hf(architecture, weights))
    samples = masked_samples(architecture, number=4, length=20)
    tokens, further = inputs_of(samples)
    inputs = {
        "input_ids": tokens,
        "token_type_ids": further["token_types"],
        "attention_mask": torch.from_numpy(samples.padding_mask).long(),
    }
    if head == "choice":
        inputs = {key: tensor[None] for key, tensor in inputs.items()}
    with torch.no_grad():
        ours = to_model(architecture, weights)(tokens, **further)
        theirs = oracle(**inputs).logits
    assert ours.logits.numel() == 0
    assert (ours.sample_logits.view(theirs.shape) - theirs).abs().max() <= 1e-5


def test_dropout_drops_the_input_of_the_head_of_a_task() -> None:
    architecture = bert(task_head="classes", num_classes=2, sentence_order_head=False)
    model = to_model(architecture, random_tensors(architecture, 3))
    tokens, numbers = torch.arange(10).view(1, 10), torch.tensor([7])
    with torch.no_grad():
        whole = model(tokens, sample_numbers=numbers).sample_logits
        model.dropout_rates = DropoutRates(hidden=0.5, attention=0.0, embedding=0.0, seed=1)
        # Of a layer with zero weights, dropout has no effect: what is left is that of the head.
        for layer in model.layers.values():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        dropped = [model(tokens, sample_numbers=numbers).sample_logits for _ in range(2)]
        model.dropout_rates = None
        plain = model(tokens, sample_numbers=numbers).sample_logits
    assert torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[0], plain)
    assert not torch.equal(whole, plain)
