"""Profiles of steps: traces for some steps of the first ranks, which change no result."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.support.runs import losses, make_run, train_here
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import read_run
from tokamake.config.training import TrainSettings
from tokamake.train.hooks import FinishedStep
from tokamake.train.hooks.profile import MAX_RANKS, StepProfile
from tokamake.train.step_result import NO_RESULT

pytestmark = pytest.mark.usefixtures("lone_rank")


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as stream:
        trace: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return trace


def updates(path: Path) -> int:
    return sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events(path))


def test_a_trace_has_the_steps_that_are_asked_for(
    root: Path, single: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(root, "profiled", profile_steps=[2, 4])
    assert train_here(config) == 0
    path = read_run(config).output / "profile/rank-0.json.gz"
    assert f"{path}: trace of the profiled steps\n" in capsys.readouterr().out
    assert updates(path) == 3
    assert any(event.get("name") == "aten::mm" for event in events(path))
    assert losses(config) == losses(single)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_job_that_ends_early_writes_the_steps_so_far(root: Path) -> None:
    config = make_run(root, "early", profile_steps=[2, 40])
    path = read_run(config).output / "profile/rank-0.json.gz"
    assert train_here(config, until_step=3) == 0
    assert updates(path) == 2
    path.unlink()
    assert train_here(config) == 0  # resumes within the steps
    assert updates(path) == 3


def test_only_the_first_ranks_write_traces(tmp_path: Path) -> None:
    for rank in (0, MAX_RANKS - 1, MAX_RANKS):
        profile = StepProfile(tmp_path, (1, 1), rank=rank, device=torch.device("cpu"))
        profile.begin_step(1)
        torch.ones(2) + 1
        state = ResumeState("digest", 1, 8, 1.0, 1)
        profile.end_step(FinishedStep(state, NO_RESULT, 0.01, 0.01, 8, 1.0, 0.0, is_logged=False))
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["rank-0.json.gz", f"rank-{MAX_RANKS - 1}.json.gz"]


def test_steps_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"profile_steps: \[5, 4\]: the first step comes"):
        TrainSettings.model_validate({"profile_steps": [5, 4]})
    with pytest.raises(ValidationError, match=r"profile_steps: \[9, 9\]: the run ends at step 8"):
        TrainSettings.model_validate({"profile_steps": [9, 9], "train_steps": 8})
