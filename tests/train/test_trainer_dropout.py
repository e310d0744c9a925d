"""A run with dropout is the same at every layout, with recomputation, and after a restart."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.forked import killed_in_backward, train
from tests.support.layouts import parallel
from tests.support.runs import losses, make_run, train_here
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.config.training import TrainSettings

pytestmark = pytest.mark.usefixtures("lone_rank")

RATES = {"hidden": 0.2, "attention": 0.1, "embedding": 0.1}
HIDDEN = {"dropout": {"hidden": 0.2, "embedding": 0.1}}


FEW_STEPS = {"train_steps": 3, "evaluation_steps": 0}
"""Steps while the learning rate warms up, which is the same in a longer run; nothing else is
compiled."""


@pytest.fixture(scope="module")
def dropped(root: Path) -> Path:
    """A run with all kinds of dropout on one rank."""
    config = make_run(root, "dropped", dropout=RATES)
    assert train_here(config) == 0
    return config


def test_numbers_are_dropped_in_training_alone(root: Path, dropped: Path) -> None:
    plain = make_run(root, "plain")
    assert train_here(plain) == 0
    assert losses(dropped)[0] != pytest.approx(losses(plain)[0], rel=1e-4)
    validated = [losses(config, "validation_loss")[0] for config in (dropped, plain)]
    assert validated[0] == validated[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "full"},
        pytest.param({"recompute_granularity": "selective"}, marks=pytest.mark.grid),
        {"micro_batch_size": 4},
        pytest.param({"compile": True, **FEW_STEPS}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_one_rank_drops_the_same_numbers(
    root: Path, tmp_path: Path, dropped: Path, settings: dict[str, Any]
) -> None:
    config = make_run(root, tmp_path.name, dropout=RATES, **settings)
    assert train_here(config) == 0
    number = settings.get("train_steps", 6)
    assert losses(config) == pytest.approx(losses(dropped)[:number], rel=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 3},
        pytest.param(parallel(tp=2, sp=True), marks=pytest.mark.grid),
        pytest.param({"backend": "deepspeed", "zero_stage": 2}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_two_ranks_drop_the_same_numbers(
    root: Path, tmp_path: Path, dropped: Path, settings: dict[str, Any]
) -> None:
    """Random compositions have dropout at all layouts."""
    config = make_run(root, tmp_path.name, dropout=RATES, **settings)
    train(config, ranks=2)
    assert losses(config) == pytest.approx(losses(dropped), rel=1e-5)


@pytest.mark.fault("kill in a step")
def test_a_run_resumes_with_the_same_masks(root: Path, dropped: Path) -> None:
    config = make_run(root, "killed", dropout=RATES)
    train(config, fault=killed_in_backward, code=-9)
    train(config)
    assert losses(config) == losses(dropped)


def test_an_export_states_the_rates(dropped: Path, tmp_path: Path) -> None:
    folder = dropped.parent / "training"
    assert open_any(folder).notes["dropout"] == RATES
    for number, kind in enumerate(("hf", "megatron")):
        convert(source=folder, target=tmp_path / str(number), format=kind)
    convert(source=tmp_path / "1", target=tmp_path / "2", format="hf")
    for name in ("0", "2"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["attention_dropout"] == 0.1
    assert open_any(tmp_path / "2").notes["dropout"] == {"attention": 0.1}


def test_ring_attention_has_no_weights_to_drop() -> None:
    settings = {"dropout": {"attention": 0.1}, **parallel(cp=2)}
    with pytest.raises(ValidationError, match=r"dropout\.attention: 0\.1: ring attention has no"):
        TrainSettings.model_validate(settings)
    TrainSettings.model_validate(HIDDEN | parallel(cp=2))
