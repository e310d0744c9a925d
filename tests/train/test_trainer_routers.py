"""A run of a mixture of experts has records of its routers."""

import math
from pathlib import Path

import pytest
import torch

from tests.support.dense import dense
from tests.support.random_tensors import random_tensors
from tests.support.runs import (
    make_run,
    prepare,
    records,
    train_here,
    weights,
    write_start,
)

SHAPE = dense("olmoe", num_experts=5, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=120)


def start_run(root: Path, name: str, **train: object) -> Path:
    return make_run(root, name, evaluation_steps=0, log_interval=1, **train)


@pytest.mark.usefixtures("lone_rank")
def test_records_have_the_losses_of_routers_beside_the_loss(tmp_path: Path) -> None:
    root = prepare(tmp_path)
    write_start(root / "start", SHAPE, random_tensors(SHAPE, 5))
    config = start_run(root, "experts", router={"balance_coefficient": 1.0, "z_coefficient": 0.1})
    assert train_here(config) == 0
    of_run = [record for record in records(config) if "loss" in record]
    for record in of_run:
        assert record["loss"] < math.log(SHAPE.vocab_size or 0) + 0.5  # the cross entropy alone
        assert record["balance_loss"] >= 0.99
        assert 0 < record["router_entropy"] <= math.log(5) + 1e-6
        layers = [record[f"busiest_expert/layers.{number}"] for number in range(2)]
        assert record["busiest_expert"] == max(layers)
        assert 1 <= min(layers) <= 2.5  # at most each token
        assert record["idle_experts"] == 0
    assert of_run[-1]["router_z_loss"] < of_run[0]["router_z_loss"]
    plain = start_run(root, "plain", router={"balance_coefficient": 0.0})
    assert train_here(plain) == 0
    assert records(plain)[0]["loss"] == of_run[0]["loss"]
    gate = "model.layers.0.mlp.gate.weight"
    assert not torch.equal(weights(plain)[gate], weights(config)[gate])
