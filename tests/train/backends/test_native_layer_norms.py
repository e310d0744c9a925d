"""Gradient norms of layers equal those of transformers, at each kind of layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.support.forked import train
from tests.support.proofs import loss_of, their_model
from tests.support.runs import (
    losses,
    make_run,
    records,
    train_here,
    whole_batches,
)
from tokamake.config.training import TrainSettings

pytestmark = pytest.mark.usefixtures("lone_rank")

NAMES = ["layers.0", "layers.1", "others"]


def norms_of(config: Path) -> dict[str, float]:
    """Norms of layers in the first record."""
    record = records(config)[1]
    return {name: record[f"grad_norm/{name}"] for name in NAMES}


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, float]:
    """Norms of the first step, by transformers."""
    model = their_model(root / "start")
    loss_of(model, torch.from_numpy(next(whole_batches(root, "train", size=8)))).backward()
    squares = dict.fromkeys(NAMES, 0.0)
    for name, parameter in model.named_parameters():
        layer = name.removeprefix("model.").split(".")
        group = f"layers.{layer[1]}" if layer[0] == "layers" else "others"
        squares[group] += parameter.grad.double().square().sum().item()
    return {name: math.sqrt(value) for name, value in squares.items()}


def test_norms_of_layers_equal_those_of_transformers(
    root: Path, single: Path, expected: dict[str, float]
) -> None:
    config = make_run(root, "layers", log_layer_norms=True)
    assert train_here(config) == 0
    assert norms_of(config) == pytest.approx(expected, rel=1e-5)
    for record in records(config):
        if "loss" in record:
            squares = sum(record[f"grad_norm/{name}"] ** 2 for name in NAMES)
            assert math.sqrt(squares) == pytest.approx(record["grad_norm"], rel=1e-5)
    assert losses(config, "grad_norm") == losses(single, "grad_norm")
    assert not any("grad_norm/others" in record for record in records(single))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"zero_stage": 2}, marks=pytest.mark.grid),
        {"parallel": {"tensor_parallel_size": 2, "sequence_parallel": True}},
        {"parallel": {"pipeline_parallel_size": 2}},
        pytest.param({"parallel": {"context_parallel_size": 2}}, marks=pytest.mark.grid),
        pytest.param({"zero_stage": 3, "precision": "fp16"}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_ranks_add_up_the_norms_of_layers(
    root: Path, tmp_path: Path, expected: dict[str, float], settings: dict[str, Any]
) -> None:
    config = make_run(root, tmp_path.name, log_layer_norms=True, train_steps=2, **settings)
    train(config, ranks=2)
    rel = 1e-2 if "precision" in settings else 1e-5
    assert norms_of(config) == pytest.approx(expected, rel=rel)


def test_deepspeed_does_not_tell_the_norms_of_layers() -> None:
    settings = {"log_layer_norms": True, "backend": "deepspeed"}
    with pytest.raises(ValidationError, match=r"log_layer_norms: true: .* set backend to native"):
        TrainSettings.model_validate(settings)
