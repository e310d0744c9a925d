"""The family hf_t5 equals transformers' T5, on any tensor-parallel ranks."""

from functools import partial

import pytest
import torch

from tests.support.hf_folder import from_hf
from tests.support.model_steps import assert_same_step
from tests.support.t5s import (
    HF_ARCHITECTURES,
    hf_reference,
    inputs_of,
    mean_loss,
    span_samples,
    their_logits,
    their_loss,
)
from tokamake.checkpoint.model_tensors import to_model
from tokamake.parallel.loss import NO_LABEL

PLAIN = HF_ARCHITECTURES["hf_t5"]
# Longer than relative_attention_max_distance.
samples_of = partial(span_samples, number=3, length=40, decoder_length=27)


@pytest.mark.parametrize("name", HF_ARCHITECTURES)
def test_logits_loss_gradients_and_a_step_equal_transformers(name: str) -> None:
    architecture = HF_ARCHITECTURES[name]
    oracle = hf_reference(architecture)
    weights = {name: tensor.detach().clone() for name, tensor in oracle.named_parameters()}
    model = to_model(architecture, from_hf(architecture, weights))
    samples = samples_of(architecture)
    tokens, further = inputs_of(samples)
    with torch.no_grad():
        ours, theirs = model(tokens, **further), their_logits(oracle, samples)
    has_loss = torch.from_numpy(samples.labels != NO_LABEL)
    assert (ours - theirs)[has_loss].abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1)
    losses = mean_loss(model, samples), their_loss(oracle, samples)
    assert_same_step(architecture, model, oracle=oracle, losses=losses)
