"""Training on two ranks equals training on one, also after kills and on another layout."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.forked import killed_in_save, train
from tests.support.interrupted_runs import assert_same_end
from tests.support.runs import (
    assert_equal_weights,
    copy,
    launch,
    losses,
    make_run,
    records,
    summary,
    train_here,
    weights,
)
from tokamake.config.resolved_run import read_run

pytestmark = pytest.mark.usefixtures("lone_rank")


@pytest.fixture(scope="module")
def double(root: Path) -> Path:
    """A finished run of two ranks; do not write here."""
    config = make_run(root, "double")
    train(config, ranks=2)
    return config


@pytest.mark.ranks
def test_two_ranks_equal_one(single: Path, double: Path) -> None:
    for key in ("loss", "grad_norm", "validation_loss"):
        assert losses(double, key) == pytest.approx(losses(single, key), rel=1e-5)
    assert_equal_weights(double, single, rtol=1e-4, atol=1e-5)
    assert summary(double)["world_size"] == 2


@pytest.mark.ranks
def test_checks_of_the_hardware_change_no_bit(root: Path, double: Path) -> None:
    config = make_run(root, "verified", verify_interval=1)
    train(config, ranks=2)
    assert losses(config) == losses(double)
    assert_equal_weights(config, double, rtol=0, atol=0)


@pytest.mark.grid
@pytest.mark.ranks
def test_mpiexec_starts_the_same_run(root: Path, double: Path) -> None:
    config = make_run(root, "mpi")
    launch(config, ranks=2, launcher="mpiexec")
    assert summary(config)["world_size"] == 2
    assert losses(config) == losses(double)


@pytest.mark.fault("kill in a step")
@pytest.mark.ranks
def test_a_killed_run_resumes_bit_by_bit(root: Path, double: Path) -> None:
    assert_survives_kill(make_run(root, "killed"), double)


@pytest.mark.fault("kill in a step")
@pytest.mark.grid
@pytest.mark.ranks
def test_a_killed_run_in_bf16_and_stage_3_resumes_bit_by_bit(root: Path, single: Path) -> None:
    settings: dict[str, Any] = {"zero_stage": 3, "precision": "bf16"}
    expected = make_run(root, "uninterrupted", **settings)
    train(expected, ranks=2)
    assert losses(expected) == pytest.approx(losses(single), rel=1e-3)
    assert losses(expected) != losses(single)
    # Checkpoints keep fp32 weights in every precision.
    assert {tensor.dtype for tensor in weights(expected).values()} == {torch.float32}
    assert_survives_kill(make_run(root, "killed3", **settings), expected)


def assert_survives_kill(config: Path, expected: Path) -> None:
    """Kill rank 0 while it saves step 4, then resume, and compare with an uninterrupted run."""
    train(config, ranks=2, fault=partial(killed_in_save, 5, 0), code=-9)
    output = read_run(config).output
    assert (output / "latest").read_text() == "global_step2"
    # Training went on while the checkpoint was written.
    done = [record["step"] for record in records(config) if "loss" in record]
    assert done[:4] == [1, 2, 3, 4]
    assert "continuing at step 2" in train(config, ranks=2)
    assert_same_end(config, expected)


@pytest.mark.ranks
def test_an_error_of_all_ranks_is_reported_once(root: Path) -> None:
    config = make_run(root, "indivisible", global_batch_size=6)
    printed = train(config, ranks=2, code=2)
    message = "6 samples cannot be shared by 2 data-parallel ranks in micro batches of 2; make it"
    assert printed.count(message) == 1


@pytest.mark.ranks
@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 3},
        pytest.param(
            {"parallel": {"tensor_parallel_size": 2, "sequence_parallel": True}},
            marks=pytest.mark.grid,
        ),
        pytest.param({"parallel": {"pipeline_parallel_size": 2}}, marks=pytest.mark.grid),
    ],
    ids=["sharded", "tensor", "pipeline"],
)
def test_a_run_moves_to_another_layout_and_back(
    root: Path, single: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = copy(single, tmp_path / "run")
    latest, alone = read_run(config).output / "latest", config.read_text()
    latest.write_text("global_step2")
    before = read_run(config).train.model_dump(mode="json")
    value = {**yaml.safe_load(alone), "train": {**before, **settings, "micro_batch_size": 1}}
    config.write_text(yaml.safe_dump(value))
    assert "continuing at step 2" in train(config, ranks=2)
    assert losses(config) == pytest.approx(losses(single), rel=1e-5)
    assert_equal_weights(config, single, rtol=1e-4, atol=1e-5)
    latest.write_text("global_step4")
    config.write_text(alone)
    assert train_here(config) == 0
    assert losses(config) == pytest.approx(losses(single), rel=1e-5)
    assert not list(tmp_path.glob("run/training.*"))
