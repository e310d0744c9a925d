"""Runs that are stopped or interrupted, changes of their settings, comparison of their ends."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.forked import train
from tests.support.runs import hashes, losses, make_run
from tokamake.config.resolved_run import read_run

Settings = dict[str, Any]
LOWER: Settings = {"optimizer": {"learning_rate": 0.002}}
CONTINUE: Settings = {"on_change": "continue"}

LAYOUTS: dict[str, Settings] = {
    "sharded": {"zero_stage": 3},
    "tensor": {"parallel": {"tensor_parallel_size": 2}},
    "context": {"parallel": {"context_parallel_size": 2}},
    "pipeline": {"parallel": {"pipeline_parallel_size": 2}},
    "deepspeed": {"backend": "deepspeed", "zero_stage": 2},
}
"""Settings of each kind of layout, for two ranks."""
GRID: dict[str, tuple[int, Settings]] = {
    "data": (2, {"zero_stage": 1}),
    "sharded": (2, LAYOUTS["sharded"]),
    "tensor": (2, LAYOUTS["tensor"]),
    "context": (2, LAYOUTS["context"]),
    "pipeline": (2, LAYOUTS["pipeline"]),
    "deepspeed": (2, LAYOUTS["deepspeed"]),
    "deepspeed-3": (2, {"backend": "deepspeed", "zero_stage": 3}),
    "sharded-4": (4, {"zero_stage": 3}),
    "tensor-data": (4, {"parallel": {"tensor_parallel_size": 2}, "zero_stage": 2}),
    "pipeline-tensor": (
        4,
        {"parallel": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}},
    ),
}
"""Number of ranks and settings of each layout."""


def latest(config: Path) -> str:
    return (read_run(config).output / "latest").read_text()


def assert_same_end(actual: Path, expected: Path) -> None:
    """Compare losses, and the files of the last checkpoints: weights, optimizer, random states."""
    for key in ("loss", "grad_norm", "validation_loss"):
        assert losses(actual, key) == losses(expected, key)
    step = int(latest(expected).removeprefix("global_step"))
    assert latest(actual) == latest(expected)
    assert hashes(actual, step) == hashes(expected, step)
    assert not (read_run(actual).output / ".saving").exists()


def output(config: Path) -> Path:
    return read_run(config).output


def stop_at(config: Path, step: int) -> None:
    """Turn a finished run into one that was stopped at an earlier step."""
    for folder in output(config).glob("global_step*"):
        if int(folder.name.removeprefix("global_step")) > step:
            shutil.rmtree(folder)
    config.with_name("train.json").unlink(missing_ok=True)
    (output(config) / "latest").write_text(f"global_step{step}")


def stopped(root: Path, name: str, *, ranks: int = 1, **settings: Any) -> Path:
    """A run of 6 steps that was stopped at step 4; a folder trains each of its settings once."""
    key = json.dumps([str(root), ranks, settings], default=str)
    if key not in _trained:
        config = make_run(root, f"trained-{len(_trained)}-here", **settings)
        train(config, ranks=ranks)
        stop_at(config, 4)
        _trained[key] = config
    shutil.copytree(_trained[key].parent, root / name)
    return make_run(root, name, **settings)


_trained: dict[str, Path] = {}
"""The run.yaml of the runs that `stopped` copies, by folder, number of ranks and settings."""
