"""The family hf_t5 equals transformers' T5, on any tensor-parallel ranks."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.hf_tensors import from_hf, to_hf
from tests.support.model_ranks import assert_tensor_parallel_equals_one_process
from tests.support.paths import ROOT
from tests.support.random_tensors import random_tensors
from tests.support.t5s import (
    HF_ARCHITECTURES,
    hf_reference,
    hf_t5,
    inputs_of,
    mean_loss,
    span_samples,
    their_logits,
    their_loss,
)
from tokamake.checkpoint.model_tensors import shapes, to_model
from tokamake.config.architecture import Architecture, read_architecture
from tokamake.config.parallel import ParallelSettings
from tokamake.errors import UserError
from tokamake.models.common.recompute import Recompute
from tokamake.models.hf_t5 import memory
from tokamake.models.hf_t5 import model as family
from tokamake.parallel.loss import NO_LABEL
from tokamake.validation import validate

PLAIN = HF_ARCHITECTURES["hf_t5"]
# Longer than relative_attention_max_distance.
samples_of = partial(span_samples, number=3, length=40, decoder_length=27)


def as_stored(architecture: Architecture, model: Any, *, gradients: bool) -> dict[str, Any]:
    """Weights or gradients of our model, by name and in the shape of transformers'."""
    values = {
        family.Model.tensor_name(name): (p.grad if gradients else p).detach()
        for name, p in model.named_parameters()
    }
    return to_hf(architecture, values)


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
    loss, expected = mean_loss(model, samples), their_loss(oracle, samples)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    models = (model, oracle)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3) for each in models]
    loss.backward()
    expected.backward()
    gradients = as_stored(architecture, model, gradients=True)
    oracle_gradients = {name: p.grad for name, p in oracle.named_parameters()}
    assert gradients.keys() == oracle_gradients.keys()
    largest = max(gradient.abs().max() for gradient in oracle_gradients.values())
    for key, gradient in oracle_gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[key], gradient, atol=1e-5 * largest, rtol=1e-4)
    for optimizer in optimizers:
        optimizer.step()
    stepped = as_stored(architecture, model, gradients=False)
    for key, parameter in oracle.named_parameters():
        assert (stepped[key] - parameter).abs().max() <= 1e-6


@pytest.mark.parametrize("name", ["full", "selective"])
def test_recomputing_changes_nothing(name: Any) -> None:
    model = to_model(PLAIN, {n: t.clone() for n, t in random_tensors(PLAIN, 1).items()})
    samples, gradients = samples_of(PLAIN), []
    for recompute in (Recompute(), Recompute(name)):
        model.set_recompute(recompute)
        model.zero_grad()
        mean_loss(model, samples).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert all(torch.equal(gradients[1][n], gradient) for n, gradient in gradients[0].items())


@pytest.mark.parametrize("name", HF_ARCHITECTURES)
def test_shapes_are_those_of_parameters_and_flops_those_that_torch_counts(name: str) -> None:
    architecture = HF_ARCHITECTURES[name]
    model = family.Model(architecture)
    parameters = {model.tensor_name(n): (*p.shape,) for n, p in model.named_parameters()}
    assert list(parameters.items()) == list(shapes(architecture).items())
    samples = span_samples(architecture, number=2, length=32, decoder_length=16)
    samples.padding_mask[:] = True
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        mean_loss(model, samples).backward()
    assert memory.flops_per_token(architecture, 32, 16) * 2 * 32 == counter.get_total_flops()


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_tensor_parallel_ranks_equal_one_process(world_size: int) -> None:
    # 17 tokens of the decoder: sequence parallelism pads them.
    samples = span_samples(HF_ARCHITECTURES["hf_t5-tied"], number=3, length=32, decoder_length=17)
    loss_of = partial(mean_loss, samples=samples)
    assert_tensor_parallel_equals_one_process(HF_ARCHITECTURES, world_size, loss_of=loss_of)


PUBLISHED = {"t5-v1.1-small": 76_961_152, "t5-v1.1-base": 247_577_856}
"""Parameters of google/t5-v1_1-small and -base, with 32,128 tokens."""


def test_published_sizes_have_the_published_number_of_parameters() -> None:
    for name, number in PUBLISHED.items():
        shape = read_architecture(ROOT / "config/models" / f"{name}.yaml")
        shape = shape.model_copy(update={"vocab_size": 32128})
        assert sum(map(math.prod, shapes(shape).values())) == number
    files = {path.stem for path in (ROOT / "config/models").glob("t5-v1.1-*.yaml")}
    assert files == {*PUBLISHED}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act: 'relu': hf_t5 has gelu_new or silu only"),
        ({"position_embedding": "learned"}, "'learned': hf_t5 has relative only"),
        ({"attention_bias": True}, "attention_bias: True: hf_t5 does not know it; remove"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_the_family_does_not_know_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        validate(Architecture, {**PLAIN.model_dump(), **values}, "x.yaml")


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "context_parallel_size"])
def test_pipelines_and_split_sequences_are_refused(name: str) -> None:
    settings = ParallelSettings(**{name: 2})
    with pytest.raises(UserError, match=rf"{name}: 2: .*hf_t5.*; set 1"):
        settings.check_architecture(hf_t5(), 32)
