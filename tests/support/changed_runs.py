"""Runs that were stopped in the middle, and changes of their settings."""

import shutil
from pathlib import Path
from typing import Any

from tests.support.forked import train
from tests.support.runs import make_run
from tokamake.config.resolved_run import read_run

Settings = dict[str, Any]
LOWER: Settings = {"optimizer": {"learning_rate": 0.002}}
CONTINUE: Settings = {"on_change": "continue"}


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
    """A run of 6 steps that was stopped at step 4."""
    config = make_run(root, name, **settings)
    train(config, ranks=ranks)
    stop_at(config, 4)
    return config
