"""The family hf_t5 equals transformers' T5, on any tensor-parallel ranks."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.hf_tensors import from_hf
from tests.support.model_ranks import assert_tensor_parallel_equals_one_process
from tests.support.model_steps import assert_same_step
from tests.support.paths import ROOT
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
from tokamake.parallel.loss import NO_LABEL
from tokamake.validation import validate

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
