"""A training that is killed or stopped at any point: the same command resumes it, bit by bit.

The kills are real, at layouts that `test_trainer.py` does not kill; ranks come from `forked.py`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import (
    TIMEOUT_SECONDS,
    Started,
    killed_in_backward,
    killed_in_commit,
    terminated_in_start,
    train,
    writes_until_sigterm,
)
from tests.support.ranks import CONTEXT
from tests.support.runs import losses, make_run
from tokamake import files
from tokamake.config.resolved_run import read_run
from tokamake.runtime.exit_status import Stopped

Settings = dict[str, Any]

LAYOUTS: dict[str, Settings] = {
    "sharded": {"zero_stage": 3},
    "tensor": {"parallel": {"tensor_parallel_size": 2}},
    "context": {"parallel": {"context_parallel_size": 2}},
    "pipeline": {"parallel": {"pipeline_parallel_size": 2}},
    "deepspeed": {"backend": "deepspeed", "zero_stage": 2},
}


@pytest.fixture(scope="module")
def single(root: Path) -> Path:
    """A finished run of one process; do not write here."""
    config = make_run(root, "single")
    train(config)
    return config


def latest(config: Path) -> str:
    return (read_run(config).output / "latest").read_text()


def assert_same_end(actual: Path, expected: Path) -> None:
    """Compare losses, and the files of the last checkpoints: weights, optimizer, random states."""
    for key in ("loss", "grad_norm", "validation_loss"):
        assert losses(actual, key) == losses(expected, key)
    assert hashes(actual) == hashes(expected)
    assert not (read_run(actual).output / ".saving").exists()


def hashes(config: Path) -> dict[str, str]:
    folder = read_run(config).output / latest(config)
    digests = {path.name: files.sha256(path) for path in folder.glob("*.distcp")}
    assert digests
    return digests


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_killed_in_a_step_resumes_with_the_same_result(root: Path, layout: str) -> None:
    expected = make_run(root, f"whole-{layout}", **LAYOUTS[layout])
    train(expected, ranks=2)
    config = make_run(root, f"killed-{layout}", **LAYOUTS[layout])
    assert_survives_kill(config, expected, ranks=2)


def assert_survives_kill(config: Path, expected: Path, *, ranks: int) -> None:
    train(config, ranks=ranks, fault=killed_in_backward, code=-9)
    assert latest(config) == "global_step2"
    assert "continuing at step 2" in train(config, ranks=ranks)
    assert_same_end(config, expected)


def test_a_kill_during_the_batch_size_ramp_up(root: Path) -> None:
    settings: Settings = {"rampup_batch_size": [4, 4, 10], "micro_batch_size": 1}
    expected = make_run(root, "whole-growing", **settings)
    train(expected)
    assert_survives_kill(make_run(root, "killed-growing", **settings), expected, ranks=1)


@pytest.mark.ranks
def test_sigterm_before_a_step(root: Path) -> None:
    config = make_run(root, "early", zero_stage=2)
    with Started(config, ranks=2, fault=terminated_in_start) as started:
        assert started.ended() == [Stopped.SIGTERM] * 2, started.printed
        opening = started.printed.splitlines()
    assert opening[-1] == "stopped by SIGTERM; there was nothing to save"
    assert [line for line in opening[:-1] if line.startswith("stopped")] == []
    assert "Traceback" not in "".join(opening)
    assert not (read_run(config).output / "latest").exists()


@pytest.mark.ranks
def test_sigterm_while_a_checkpoint_is_written(root: Path) -> None:
    expected = make_run(root, "whole", zero_stage=2)
    train(expected, ranks=2)
    config = make_run(root, "stopped", zero_stage=2)
    writing = CONTEXT.Semaphore(0)
    with Started(config, ranks=2, fault=partial(writes_until_sigterm, writing)) as started:
        for _ in started.processes:
            assert writing.acquire(timeout=TIMEOUT_SECONDS)
        for process in started.processes:
            process.terminate()
        assert started.ended() == [Stopped.SIGTERM] * 2, started.printed
        stopped = latest(config).removeprefix("global_step")
        assert f"stopped by SIGTERM: saved at step {stopped}, run the same" in started.printed
    assert 2 < int(stopped) < 6
    assert f"continuing at step {stopped}" in train(config, ranks=2)
    assert_same_end(config, expected)


@pytest.mark.grid
def test_a_kill_between_any_two_calls_of_commit(root: Path, single: Path) -> None:
    latests = []
    for number in range(1, 40):
        config = make_run(root, f"moved-{number}")
        with Started(config, fault=partial(killed_in_commit, number)) as started:
            (code,) = started.ended()
        if code == 0:
            break
        assert code == -9, started.printed
        latests.append(latest(config))
        printed = train(config)
        assert f"continuing at step {latests[-1].removeprefix('global_step')}" in printed
        assert_same_end(config, single)
    assert code == 0
    # Some kills come before `latest` moves, some after.
    assert latests == sorted(latests)
    assert latests.count("global_step2") > 3
    assert latests.count("global_step4") > 1
