"""A training that is killed or stopped at any point: the same command resumes it, bit by bit.

The kills are real, at layouts that `test_trainer.py` does not kill; ranks come from `forked.py`.
"""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import Inject
from tests.support.forked import (
    STEP,
    TIMEOUT_SECONDS,
    Started,
    exits_in,
    killed_in_backward,
    killed_in_save,
    terminated_in_start,
    train,
    writes_until_sigterm,
)
from tests.support.interrupted_runs import GRID, LAYOUTS, assert_same_end, latest
from tests.support.ranks import CONTEXT
from tests.support.runs import make_run, prepare
from tokamake.config.resolved_run import read_run
from tokamake.runtime.exit_status import Stopped

Settings = dict[str, Any]
STEPS = 40
"""Steps of a run that is killed in its saves; more than two for each operation of a save."""
FEW_STEPS = 16
"""Steps of a run that is killed at some operations of its saves."""


@pytest.fixture
def own_root(tmp_path: Path) -> Path:
    """Folder with a dataset, an index and an initial checkpoint, for the runs of one test."""
    return prepare(tmp_path, train_samples=8 * STEPS)


@pytest.mark.grid
@pytest.mark.fault("kill in a step")
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


@pytest.mark.grid
@pytest.mark.fault("kill in a step")
def test_a_kill_during_the_batch_size_ramp_up(root: Path) -> None:
    settings: Settings = {"rampup_batch_size": [4, 4, 10], "micro_batch_size": 1}
    expected = make_run(root, "whole-growing", **settings)
    train(expected)
    assert_survives_kill(make_run(root, "killed-growing", **settings), expected, ranks=1)


@pytest.mark.fault("stop signal")
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


@pytest.mark.fault("stop signal")
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


@pytest.mark.ranks
@pytest.mark.fault("second trainer")
def test_a_second_trainer_is_refused_and_disturbs_nothing(root: Path) -> None:
    expected = make_run(root, "undisturbed")
    train(expected)
    config = make_run(root, "disturbed")
    writing = CONTEXT.Semaphore(0)
    with Started(config, fault=partial(writes_until_sigterm, writing)) as started:
        assert writing.acquire(timeout=TIMEOUT_SECONDS)
        assert "another process trains there; end it" in train(config, code=2)
        started.processes[0].terminate()
        assert started.ended() == [Stopped.SIGTERM], started.printed
    train(config)
    assert_same_end(config, expected)


@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.fault("kill in a step")
def test_a_rank_that_exits_in_a_step(root: Path) -> None:
    expected = make_run(root, "whole-exit")
    train(expected, ranks=2)
    config = make_run(root, "exited")
    train(config, ranks=2, fault=partial(exits_in, STEP, 1, 5), code=1)
    # The checkpoint of step 4 may still be on its way to the disk.
    assert "continuing at step" in train(config, ranks=2)
    assert_same_end(config, expected)


def assert_survives_each_kill_in_a_save(
    root: Path, *, ranks: int, rank: int, settings: Settings, inject: Inject, stride: int = 1
) -> list[int]:
    """Kill a rank at each file operation of a save, one in each start of a long run.

    Each start continues at the newest checkpoint and is killed in its first save, one operation
    later than the start before it, or `stride` operations.

    Returns:
        Step of `latest` after each kill, from the first save on; a kill before `latest` moves
        leaves that of the start.
    """
    settings = {**settings, "train_steps": STEPS if stride == 1 else FEW_STEPS}
    expected = make_run(root, "whole", **settings)
    train(expected, ranks=ranks)
    config = make_run(root, "killed", **settings)
    train(config, ranks=ranks, fault=partial(killed_in_save, 1, rank, 4), code=-9)
    inject()
    steps = [2]
    for number in range(1 + stride, 160, stride):
        assert latest(config) == f"global_step{steps[-1]}"
        fault = partial(killed_in_save, number, rank, steps[-1] + 2)
        with Started(config, ranks=ranks, fault=fault) as started:
            codes = started.ended()
        assert f"continuing at step {steps[-1]}" in started.printed
        if codes == [0] * ranks:
            break
        inject()
        assert codes[rank] == -9, started.printed
        steps.append(int(latest(config).removeprefix("global_step")))
    assert codes == [0] * ranks
    assert_same_end(config, expected)
    # Each kill before `latest` moves leaves it; each later one moves it by a save.
    moves = [after - before for before, after in pairwise(steps)]
    assert {*moves} <= {0, 2}
    assert moves == sorted(moves)
    return steps


@pytest.mark.fault("kill in a save")
@pytest.mark.grid
def test_a_kill_at_any_file_operation_of_a_save(own_root: Path, inject: Inject) -> None:
    steps = assert_survives_each_kill_in_a_save(
        own_root, ranks=1, rank=0, settings={}, inject=inject
    )
    # Some kills come before `latest` moves, some after.
    assert steps.count(2) > 3
    assert steps[-1] > 4


@pytest.mark.fault("kill in a save")
@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("pipeline", "last"),
        ("deepspeed", "first"),
        ("tensor-data", "first"),
    ],
)
def test_a_kill_of_a_rank_at_any_file_operation_of_a_save(
    own_root: Path, layout: str, rank: str, inject: Inject
) -> None:
    ranks, settings = GRID[layout]
    place = ranks - 1 if rank == "last" else 0
    # The first rank has most operations. A run of one rank is killed at each of them, so here some
    # are enough: each start of several ranks takes long.
    stride = 1 if place else 4 * ranks
    assert assert_survives_each_kill_in_a_save(
        own_root, ranks=ranks, rank=place, settings=settings, inject=inject, stride=stride
    )
