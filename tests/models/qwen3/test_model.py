"""The family qwen3 equals transformers' Qwen3ForCausalLM, and trains."""

from pathlib import Path

import pytest

from tests.support.forked import train
from tests.support.model_ranks import tokens_of
from tests.support.model_steps import assert_same_gradients
from tests.support.qwens import ARCHITECTURES, qwen3, reference
from tests.support.random_tensors import random_tensors
from tests.support.runs import losses, make_run, prepare, write_start
from tokamake.checkpoint.model_tensors import shapes, to_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_gradients_equal_transformers(name: str) -> None:
    architecture, oracle = ARCHITECTURES[name], reference(ARCHITECTURES[name])
    names, tensors = shapes(architecture), oracle.state_dict()
    weights = {key: each.clone() for key, each in tensors.items() if key in names}
    assert_same_gradients(to_model(architecture, weights), oracle, tokens_of(architecture, 33))


TRAINED = qwen3(vocab_size=120, num_hidden_layers=2)


def test_tokamake_train_trains_a_qwen3(tmp_path: Path) -> None:
    start = prepare(tmp_path, train_samples=200) / "start"
    write_start(start, TRAINED, random_tensors(TRAINED, 5))
    config = make_run(tmp_path, "trained", train_steps=24)
    train(config)
    history = losses(config)
    assert len(history) == 24
    assert history[-1] < history[0]
