"""The family t5 equals transformers' Blenderbot, on any tensor-parallel ranks."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.hf_tensors import from_hf
from tests.support.model_ranks import assert_tensor_parallel_equals_one_process
from tests.support.model_steps import assert_same_step
from tests.support.paths import ROOT
from tests.support.random_tensors import random_tensors
from tests.support.t5s import (
    ARCHITECTURES,
    HF_ARCHITECTURES,
    inputs_of,
    mean_loss,
    named_parameters,
    reference,
    span_samples,
    t5,
    their_logits,
    their_loss,
)
from tokamake import plugins
from tokamake.checkpoint.model_tensors import shapes, to_model
from tokamake.config.architecture import Architecture, read_architecture
from tokamake.config.parallel import ParallelSettings
from tokamake.errors import UserError
from tokamake.inference.layout import WHOLE_MODEL
from tokamake.models.common.recompute import Recompute
from tokamake.parallel.loss import NO_LABEL
from tokamake.validation import validate

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


@pytest.mark.parametrize("name", ["full", "selective"])
@pytest.mark.parametrize("architecture", [PLAIN, HF_ARCHITECTURES["hf_t5"]], ids=["t5", "hf_t5"])
def test_recomputing_changes_nothing(architecture: Architecture, name: Any) -> None:
    copies = {n: t.clone() for n, t in random_tensors(architecture, 1).items()}
    model = to_model(architecture, copies)
    samples, gradients = samples_of(architecture), []
    for recompute in (Recompute(), Recompute(name)):
        model.set_recompute(recompute)
        model.zero_grad()
        mean_loss(model, samples).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert all(torch.equal(gradients[1][n], gradient) for n, gradient in gradients[0].items())


@pytest.mark.parametrize("name", [*ARCHITECTURES, *HF_ARCHITECTURES])
def test_shapes_are_those_of_parameters_and_flops_those_that_torch_counts(name: str) -> None:
    architecture = (ARCHITECTURES | HF_ARCHITECTURES)[name]
    memory = plugins.load("models/*/memory", architecture.family)
    model = plugins.load("models/*/model", architecture.family).Model(architecture)
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
    samples = span_samples(ARCHITECTURES["t5-tanh"], number=3, length=32, decoder_length=17)
    loss_of = partial(mean_loss, samples=samples)
    assert_tensor_parallel_equals_one_process(ARCHITECTURES, world_size, loss_of=loss_of)


def test_random_weights_have_the_published_deviations() -> None:
    wide = t5(hidden_size=512, intermediate_size=512, initializer_range=0.015)
    for name, tensor in random_tensors(wide, 1).items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.full_like(tensor, float(name.endswith("weight"))))
            continue
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        # Megatron divides by the layers of the encoder, in both stacks.
        deviation = 0.015 / math.sqrt(2 * 3) if into_residual else 0.015
        assert abs(tensor.std().item() / deviation - 1) < 0.02


def test_the_published_size_has_the_published_number_of_parameters() -> None:
    """As transformers counts them, with one table of positions and the bias of the logits."""
    shape = read_architecture(ROOT / "config/models/t5-220m.yaml")
    shape = shape.model_copy(update={"vocab_size": 30522 + 102})
    number = sum(map(math.prod, shapes(shape).values()))
    assert number == 222_421_920
    assert number == pytest.approx(220e6, rel=0.02)
    with torch.device("meta"):
        theirs = sum(p.numel() for p in reference(shape).parameters())
    assert number == theirs


def test_a_decoder_has_as_many_layers_as_its_encoder_unless_it_says_so() -> None:
    assert t5(num_decoder_layers=0) == t5(num_decoder_layers=3)
    assert t5(num_decoder_layers=0).num_layers == 6
    assert PLAIN.num_layers == 5
    names = [n for n in shapes(PLAIN) if n.endswith("cross_attn.q_proj.weight")]
    assert len(names) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act: 'silu': t5 has gelu or gelu_new"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: False: t5 has True only"),
        ({"position_embedding": "rotary"}, "position_embedding: 'rotary': t5 has learned only"),
        ({"num_decoder_layers": -1}, "num_decoder_layers: -1: too small; give 1 or more"),
        ({"num_decoder_layers": "two"}, "num_decoder_layers: 'two': needs a value of type int"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06: t5 does not know it; remove"),
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
    with pytest.raises(UserError, match=rf"{name}: 2: .*t5.*; set 1"):
        settings.check_architecture(PLAIN, 32)


def test_text_cannot_be_continued() -> None:
    assert PLAIN.objectives == ("span_corruption",)
    with pytest.raises(UserError, match="family t5, an encoder-decoder, which cannot continue"):
        WHOLE_MODEL.check(PLAIN, world_size=1)
