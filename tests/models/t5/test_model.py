"""The family t5 equals transformers' Blenderbot, on any tensor-parallel ranks."""

from functools import partial

import pytest
import torch

from tests.support.hf_folder import from_hf
from tests.support.model_steps import assert_same_step
from tests.support.random_tensors import random_tensors
from tests.support.t5s import (
    ARCHITECTURES,
    inputs_of,
    mean_loss,
    named_parameters,
    reference,
    span_samples,
    t5,
    their_logits,
    their_loss,
)
from tokamake.checkpoint.model_tensors import shapes, to_model
from tokamake.parallel.loss import NO_LABEL

PLAIN = ARCHITECTURES["t5"]
samples_of = partial(span_samples, number=3, length=33, decoder_length=17)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_gradients_and_a_step_equal_transformers(name: str) -> None:
    architecture = ARCHITECTURES[name]
    oracle = reference(architecture)
    weights = {name: tensor.detach().clone() for name, tensor in named_parameters(oracle).items()}
    model = to_model(architecture, from_hf(architecture, weights))
    samples = samples_of(architecture)
    tokens, further = inputs_of(samples)
    with torch.no_grad():
        ours, theirs = model(tokens, **further), their_logits(oracle, samples)
    has_loss = torch.from_numpy(samples.labels != NO_LABEL)
    assert (ours - theirs)[has_loss].abs().max() <= 1e-5
    losses = mean_loss(model, samples), their_loss(oracle, samples)
    named = named_parameters(oracle)
    assert_same_step(architecture, model, oracle=oracle, losses=losses, named=named)


def test_label_places_choose_rows_of_the_logits() -> None:
    model, samples = to_model(PLAIN, random_tensors(PLAIN, 1)), samples_of(PLAIN)
    tokens, further = inputs_of(samples)
    label_places = torch.from_numpy((samples.labels != NO_LABEL).flatten()).nonzero()[:, 0]
    with torch.no_grad():
        chosen = model(tokens, **further, label_places=label_places)
        whole = model(tokens, **further).flatten(0, 1)[label_places]
    torch.testing.assert_close(chosen, whole, atol=1e-6, rtol=1e-6)


def test_decoders_see_earlier_tokens_and_no_padding_of_the_encoder() -> None:
    model = to_model(PLAIN, random_tensors(PLAIN, 1))
    samples = samples_of(PLAIN)
    tokens, further = inputs_of(samples)
    with torch.no_grad():
        logits = model(tokens, **further)
        is_padding = further["document_ids"] == 1
        torch.testing.assert_close(model(tokens + 3 * is_padding, **further), logits)
        short = int((~is_padding[1]).sum())
        alone = model(tokens[1:2, :short], decoder_tokens=further["decoder_tokens"][1:2])
        torch.testing.assert_close(alone, logits[1:2], atol=1e-5, rtol=1e-5)
        changed = further["decoder_tokens"].clone()
        changed[:, 9] = 5
        later = model(tokens, **{**further, "decoder_tokens": changed})
    torch.testing.assert_close(later[:, :9], logits[:, :9])
    assert (later[:, 10:] - logits[:, 10:]).abs().max() > 1e-4


def test_a_decoder_has_as_many_layers_as_its_encoder_unless_it_says_so() -> None:
    assert t5(num_decoder_layers=0) == t5(num_decoder_layers=3)
    assert t5(num_decoder_layers=0).num_layers == 6
    assert PLAIN.num_layers == 5
    names = [n for n in shapes(PLAIN) if n.endswith("cross_attn.q_proj.weight")]
    assert len(names) == 2
