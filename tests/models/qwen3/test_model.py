"""The family qwen3 equals transformers' Qwen3ForCausalLM, on one rank and on several."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.cached import decoded
from tests.support.families import named_tensors
from tests.support.forked import train
from tests.support.layouts import Layout, parallel, train_all
from tests.support.model_loss import mean_loss
from tests.support.model_ranks import assert_tensor_parallel_equals_one_process, tokens_of
from tests.support.paths import ROOT
from tests.support.qwens import ARCHITECTURES, qwen3, reference
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tests.support.runs import losses, make_run, prepare, write_start
from tokamake.checkpoint.model_tensors import shapes, to_model
from tokamake.config.architecture import Architecture, read_architecture
from tokamake.errors import UserError
from tokamake.models.qwen3 import memory
from tokamake.models.qwen3.model import Model
from tokamake.validation import validate

SHAPES = pytest.mark.parametrize("name", ARCHITECTURES)


def weights_of(name: str, model: Any) -> dict[str, torch.Tensor]:
    names = shapes(ARCHITECTURES[name])
    return {key: each.clone() for key, each in model.state_dict().items() if key in names}


@SHAPES
def test_logits_loss_and_gradients_equal_transformers(name: str) -> None:
    oracle = reference(ARCHITECTURES[name])
    model = to_model(ARCHITECTURES[name], weights_of(name, oracle))
    tokens = tokens_of(ARCHITECTURES[name], 33)
    with torch.no_grad():
        assert (model(tokens) - oracle(tokens).logits).abs().max() <= 1e-5
    loss, expected = mean_loss(model, tokens), oracle(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    loss.backward()
    expected.backward()
    gradients = {Model.tensor_name(key): each.grad for key, each in model.named_parameters()}
    expected_gradients = {key: each.grad for key, each in oracle.named_parameters()}
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in expected_gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[key], gradient, atol=2e-6, rtol=1e-4)


@SHAPES
def test_shapes_are_those_of_the_model_in_its_order(name: str) -> None:
    with torch.device("meta"):
        model = Model(ARCHITECTURES[name])
    parameters = [(key, tuple(tensor.shape)) for key, tensor in named_tensors(model).items()]
    assert parameters == [*shapes(ARCHITECTURES[name]).items()]


def test_decoding_with_a_cache_equals_the_full_forward() -> None:
    model = to_model(ARCHITECTURES["qwen3"], random_tensors(ARCHITECTURES["qwen3"], 1))
    tokens = tokens_of(ARCHITECTURES["qwen3"], 20)
    logits = decoded(model, tokens, [5, 1, 1, 7, 6])
    with torch.no_grad():
        torch.testing.assert_close(logits, model(tokens), atol=1e-5, rtol=1e-5)


def test_flops_equal_those_that_torch_counts() -> None:
    model = to_model(ARCHITECTURES["qwen3"], random_tensors(ARCHITECTURES["qwen3"], 0))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        mean_loss(model, tokens_of(ARCHITECTURES["qwen3"], 33)).backward()
    flops = memory.flops_per_token(ARCHITECTURES["qwen3"], 32)
    assert flops * 2 * 32 == counter.get_total_flops()


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias", "embedding_layernorm"])
def test_settings_that_the_family_does_not_know_are_refused(name: str) -> None:
    values = ARCHITECTURES["qwen3"].model_dump() | {name: True}
    with pytest.raises(UserError, match=f"{name}: True: qwen3 does not know it; remove it"):
        validate(Architecture, values, "x.yaml")


PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "tiny-qwen3": 4_917_440,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_published_number_of_parameters(name: str) -> None:
    shape = read_architecture(ROOT / f"config/models/{name}.yaml")
    shape = shape.model_copy(update={"vocab_size": shape.vocab_size or 8192})
    assert sum(map(math.prod, shapes(shape).values())) == PUBLISHED[name]


# An even vocabulary, so that ranks have equal parts of it.
SHARED = {"untied": qwen3(vocab_size=132), "mqa": qwen3(vocab_size=132, num_key_value_heads=1)}


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_parallel_ranks_equal_one_process(world_size: int) -> None:
    assert_tensor_parallel_equals_one_process(SHARED, world_size)


TRAINED = qwen3(vocab_size=120, num_hidden_layers=2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": parallel(tp=2),
    "sequence": parallel(tp=2, sp=True),
    "fsdp": {"zero_stage": 3},
    "pipeline": parallel(pp=2),
}


def run_of(root: Path, name: str) -> Path:
    write_start(prepare(root, train_samples=200) / "start", TRAINED, random_tensors(TRAINED, 5))
    return make_run(root, name, train_steps=24)


@pytest.mark.ranks
def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    config = run_of(tmp_path, "shared")
    (alone,) = spawn(train_all, 1, [Layout(config, {})])
    ranks = spawn(train_all, 2, [Layout(config, changes) for changes in LAYOUTS.values()])
    assert alone[0]["losses"][-1] < alone[0]["losses"][0]
    for number, name in enumerate(LAYOUTS):
        for results in ranks:
            for key in ("losses", "norms", "validation"):
                expected = pytest.approx(alone[0][key], rel=1e-4)
                assert results[number][key] == expected, f"{name} {key}"


def test_tokamake_train_trains_a_qwen3(tmp_path: Path) -> None:
    config = run_of(tmp_path, "trained")
    train(config)
    history = losses(config)
    assert len(history) == 24
    assert history[-1] < history[0]
