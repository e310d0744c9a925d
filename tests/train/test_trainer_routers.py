"""A run of a mixture of experts has records of its routers, and of further tokens (MTP)."""

import math
from pathlib import Path

import pytest
import torch

from tests.support.dense import dense, latent
from tests.support.random_tensors import random_tensors
from tests.support.runs import (
    hashes,
    make_run,
    prepare,
    records,
    train_here,
    weights,
    write_start,
)

SHAPE = dense("olmoe", num_experts=5, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=120)


BALANCED = latent(
    num_hidden_layers=2, num_attention_heads=2, vocab_size=120, num_nextn_predict_layers=1
)


FOUR_STEPS = {"train_steps": 4, "save_interval": 4}


def start_run(root: Path, name: str, **train: object) -> Path:
    return make_run(root, name, evaluation_steps=0, log_interval=1, **train)


@pytest.mark.usefixtures("lone_rank")
def test_records_have_the_losses_of_routers_beside_the_loss(tmp_path: Path) -> None:
    root = prepare(tmp_path)
    write_start(root / "start", SHAPE, random_tensors(SHAPE, 5))
    router = {"balance_coefficient": 1.0, "z_coefficient": 0.1}
    config = start_run(root, "experts", router=router, **FOUR_STEPS)
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
    plain = start_run(root, "plain", router={"balance_coefficient": 0.0}, **FOUR_STEPS)
    assert train_here(plain) == 0
    assert records(plain)[0]["loss"] == of_run[0]["loss"]
    gate = "model.layers.0.mlp.gate.weight"
    assert not torch.equal(weights(plain)[gate], weights(config)[gate])


@pytest.mark.usefixtures("lone_rank")
def test_biases_and_mtp_layers_change_and_resume_bit_by_bit(tmp_path: Path) -> None:
    root = prepare(tmp_path)
    write_start(root / "start", BALANCED, random_tensors(BALANCED, 5))
    router = {"bias_update_rate": 0.25, "balance_coefficient": 0.0}
    config = start_run(root, "whole", router=router, train_steps=4, save_interval=2)
    assert train_here(config) == 0
    bias = weights(config)["model.layers.1.mlp.gate.e_score_correction_bias"]
    # In each step, the bias of an expert grows, shrinks, or stays if it has the mean number.
    assert {*bias.tolist()} <= {0.25 * n for n in range(-4, 5)}
    assert bias.abs().max() > 0
    assert all("busiest_expert/layers.1" in record for record in records(config)[:1])
    assert all("busiest_expert/layers.0" not in record for record in records(config)[:1])
    first, *_, last = [record for record in records(config) if "loss" in record]
    assert first["loss"] != first["mtp_loss/1"] == pytest.approx(math.log(120), abs=0.3)
    assert last["mtp_loss/1"] < first["mtp_loss/1"]
    assert first["mtp_loss"] == first["mtp_loss/1"]
    assert "busiest_expert/layers.2" in first
    half = root / "whole/training/global_step2"
    again = start_run(
        root, "again", router=router, train_steps=4, save_interval=2, start=half, finetune=False
    )
    assert train_here(again) == 0
    assert hashes(again, 4) == hashes(config, 4)
    limited = {**router, "bias_update_rate": 0.0, "capacity_factor": 0.5}
    fixed = start_run(root, "fixed", router=limited, train_steps=2)
    assert train_here(fixed) == 0
    assert not weights(fixed)["model.layers.1.mlp.gate.e_score_correction_bias"].any()
    unscaled = {"router": router, "mtp": {"loss_scaling_factor": 0.0}}
    ignored = start_run(root, "ignored", **unscaled, **FOUR_STEPS)
    assert train_here(ignored) == 0
    assert records(ignored)[0]["loss"] == first["loss"]
    assert records(ignored)[0]["mtp_loss/1"] == first["mtp_loss/1"]
    assert not torch.equal(*(weights(each)["model.norm.weight"] for each in (ignored, config)))
    assert not any("dropped_share" in record for record in records(config))
    for record in records(fixed):  # experts take at most half of the choices, rounded up
        assert 0.4 < record["dropped_share"] < 0.8
        of_layers = [record[f"dropped_share/layers.{number}"] for number in (1, 2)]
        assert record["dropped_share"] == pytest.approx(sum(of_layers) / 2)
