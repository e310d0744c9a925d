"""The family llama equals transformers' LlamaForCausalLM, for every layout of heads."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.cached import decoded
from tests.support.families import named_tensors
from tests.support.llamas import ARCHITECTURES, BIASED, WIDE_HEADS, label, reference, tensors_of
from tests.support.model_loss import mean_loss
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint.model_tensors import shapes, to_model
from tokamake.config.architecture import Architecture
from tokamake.models.llama import memory as llama_memory
from tokamake.models.llama import model as llama_model


def tokens_of(architecture: Architecture, length: int) -> torch.Tensor:
    assert architecture.vocab_size is not None
    generator = torch.Generator().manual_seed(7)
    return torch.randint(architecture.vocab_size, (2, length), generator=generator)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, BIASED, WIDE_HEADS], ids=label)
def test_logits_loss_and_gradients_equal_transformers(architecture: Architecture) -> None:
    oracle = reference(architecture)
    copied = {k: v.clone() for k, v in tensors_of(oracle, architecture).items()}
    model = to_model(architecture, copied)
    tokens = tokens_of(architecture, 33)
    with torch.no_grad():
        assert (model(tokens) - oracle(tokens).logits).abs().max() <= 1e-5
    loss, expected = mean_loss(model, tokens), oracle(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    loss.backward()
    expected.backward()
    gradients = {llama_model.Model.tensor_name(n): p.grad for n, p in model.named_parameters()}
    oracle_gradients = {n: p.grad for n, p in oracle.named_parameters()}
    assert gradients.keys() == oracle_gradients.keys()
    for key, gradient in oracle_gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[key], gradient, atol=2e-6, rtol=1e-4)


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


@pytest.mark.parametrize("steps", [[20], [1] * 20, [5, 1, 1, 7, 6]], ids=len)
@pytest.mark.parametrize("architecture", ARCHITECTURES[::4], ids=label)
def test_decoding_with_a_cache_equals_the_full_forward(
    architecture: Architecture, steps: list[int]
) -> None:
    model = to_model(architecture, tensors_of(reference(architecture), architecture))
    tokens = tokens_of(architecture, 20)
    with torch.no_grad():
        expected = model(tokens)
    torch.testing.assert_close(decoded(model, tokens, steps), expected, atol=1e-5, rtol=1e-5)


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


def test_random_weights_have_the_published_deviations() -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 512, "initializer_range": 0.03}
    architecture = Architecture(**{**ARCHITECTURES[0].model_dump(), **sizes})
    weights = random_tensors(architecture, 1)
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones(512))
            continue
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        deviation = 0.03 / math.sqrt(2 * 3) if into_residual else 0.03
        assert abs(tensor.std().item() / deviation - 1) < 0.02
        assert abs(tensor.mean().item()) < 0.02 * deviation


def test_random_weights_do_not_change_between_versions() -> None:
    head = random_tensors(ARCHITECTURES[0], 1234)["lm_head.weight"]
    assert head.double().abs().sum().item() == pytest.approx(131.89298712153865, rel=1e-7)


def test_a_model_shares_memory_with_its_tensors() -> None:
    architecture = ARCHITECTURES[0]
    weights = random_tensors(architecture, 0)
    model = to_model(architecture, weights)
    back = named_tensors(model)
    assert {n: t.shape for n, t in back.items()} == shapes(architecture)
    assert all(back[name].data_ptr() == tensor.data_ptr() for name, tensor in weights.items())


@pytest.mark.parametrize("architecture", [ARCHITECTURES[4], WIDE_HEADS], ids=["even", "wide"])
def test_flops_equal_those_that_torch_counts(architecture: Architecture) -> None:
    model = to_model(architecture, random_tensors(architecture, 0))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        mean_loss(model, tokens_of(architecture, 33)).backward()
    assert llama_memory.flops_per_token(architecture, 32) * 2 * 32 == counter.get_total_flops()
