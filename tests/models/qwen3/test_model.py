"""The family qwen3 equals transformers' Qwen3ForCausalLM, on one rank and on several."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import train
from tests.support.layouts import Layout, parallel, train_all
from tests.support.model_ranks import tokens_of
from tests.support.model_steps import assert_same_gradients
from tests.support.qwens import ARCHITECTURES, qwen3, reference
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tests.support.runs import losses, make_run, prepare, write_start
from tokamake.checkpoint.model_tensors import shapes, to_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_gradients_equal_transformers(name: str) -> None:
    architecture, oracle = ARCHITECTURES[name], reference(ARCHITECTURES[name])
    names, tensors = shapes(architecture), oracle.state_dict()
    weights = {key: each.clone() for key, each in tensors.items() if key in names}
    assert_same_gradients(to_model(architecture, weights), oracle, tokens_of(architecture, 33))


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
