"""The family llama equals transformers' LlamaForCausalLM, for every layout of heads."""

import pytest
import torch

from tests.support.llamas import ARCHITECTURES, BIASED, WIDE_HEADS, label, reference, tensors_of
from tests.support.model_loss import mean_loss
from tests.support.model_ranks import tokens_of
from tests.support.model_steps import assert_same_gradients
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, BIASED, WIDE_HEADS], ids=label)
def test_logits_loss_and_gradients_equal_transformers(architecture: Architecture) -> None:
    oracle = reference(architecture)
    copied = {k: v.clone() for k, v in tensors_of(oracle, architecture).items()}
    assert_same_gradients(to_model(architecture, copied), oracle, tokens_of(architecture, 33))


def test_logits_equal_transformers_at_far_positions() -> None:
    architecture = ARCHITECTURES[4]
    oracle = reference(architecture)
    tokens = tokens_of(architecture, 1500)
    with torch.no_grad():
        expected = oracle(tokens).logits
        model = to_model(architecture, tensors_of(oracle, architecture))
        assert (model(tokens) - expected).abs().max() <= 2e-5
        oracle = reference(architecture, torch.bfloat16)
        model = to_model(architecture, tensors_of(oracle, architecture))
        model_error = (model(tokens) - expected).abs().mean()
        oracle_error = (oracle(tokens).logits - expected).abs().mean()
    assert mean_loss(model, tokens).dtype == torch.float32
    assert 0 < model_error <= 1.05 * oracle_error


def test_random_weights_depend_only_on_seed_and_name() -> None:
    small = ARCHITECTURES[0]
    deeper = small.model_copy(update={"num_hidden_layers": 5})
    weights, other_seed, again = (
        random_tensors(small, 3),
        random_tensors(small, 4),
        random_tensors(small, 3),
    )
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(weights[name], again[name])
    assert torch.equal(weights[name], random_tensors(deeper, 3)[name])
    assert not torch.equal(weights[name], other_seed[name])
    assert not torch.equal(weights[name], weights[name.replace("layers.1", "layers.2")])


def test_random_weights_do_not_change_between_versions() -> None:
    head = random_tensors(ARCHITECTURES[0], 1234)["lm_head.weight"]
    assert head.double().abs().sum().item() == pytest.approx(131.89298712153865, rel=1e-7)
