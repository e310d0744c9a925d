"""The family qwen3 equals transformers' Qwen3ForCausalLM, on one rank and on several."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked import train
from tests.support.layouts import Layout, parallel, train_all
from tests.support.model_loss import mean_loss
from tests.support.model_ranks import tokens_of
from tests.support.qwens import ARCHITECTURES, qwen3, reference
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tests.support.runs import losses, make_run, prepare, write_start
from tokamake.checkpoint.model_tensors import shapes, to_model
from tokamake.models.qwen3.model import Model

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
