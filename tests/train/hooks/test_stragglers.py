"""Slow ranks: by what they take alone, named with their host, in the log and in a file."""

import math
from pathlib import Path

import pytest
import torch

from tests.support.ranks import spawn
from tests.support.runs import make_run, train_here
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import read_run
from tokamake.train.hooks import FinishedStep, stragglers
from tokamake.train.hooks.stragglers import (
    RankTimes,
    Stragglers,
    product_seconds,
    read_slow,
    slow_ranks,
)
from tokamake.train.step_result import StepResult

HOSTS = ("n1", "n1", "n2")


def test_a_rank_that_waits_for_samples_is_slow() -> None:
    times = [RankTimes(0.01, 0.002), RankTimes(0.5, 0.002), RankTimes(0.02, 0.002)]
    assert slow_ranks(times, 1.0) == {
        1: "waits 0.500 s a step for samples, other ranks 0.020 s of 1.000 s"
    }


def test_a_slow_device_is_named() -> None:
    times = [RankTimes(0, 0.002), RankTimes(0, 0.0021), RankTimes(0, 0.0042)]
    assert slow_ranks(times, 1.0) == {2: "its device takes 2.0 times as long as other ranks"}


def test_one_of_two_ranks_can_be_slow() -> None:
    assert [*slow_ranks([RankTimes(0, 0.004), RankTimes(0, 0.002)], 1.0)] == [0]
    assert [*slow_ranks([RankTimes(0, 0.002), RankTimes(0.6, 0.002)], 1.0)] == [1]


def test_ranks_of_the_same_speed_are_not_slow() -> None:
    assert slow_ranks([RankTimes(0.01, 0.002)] * 3, 1.0) == {}
    assert slow_ranks([RankTimes(0.5, 0.1)], 1.0) == {}


def looked_at(folder: Path) -> list[list[str]]:
    """Lines of six looks, at which the last rank reads slowly, but not at the fourth one."""
    rank = torch.distributed.get_rank()
    watch = Stragglers(folder, HOSTS, rank=rank, device=torch.device("cpu"))
    readings = [0.5 * (rank == 2) * is_slow for is_slow in (1, 1, 1, 0, 1, 1)]
    stragglers._LOOK_SECONDS = 1e9  # the product is measured once, and noise is not a slow rank
    watch._product, watch._measured_at = 0.001, 1e12
    return [
        watch.look(step, reading=reading, step_seconds=1) for step, reading in enumerate(readings)
    ]


@pytest.mark.ranks
def test_a_rank_is_named_once_it_was_slow_twice(tmp_path: Path) -> None:
    """Each look compares the times of the look before."""
    reason = "waits 0.500 s a step for samples, other ranks 0.000 s of 1.000 s"
    first, *others = spawn(looked_at, 3, tmp_path)
    assert first == [[], [], [f"rank 2 on n2 is slow: {reason}"], [], [], []]
    assert others == [[[]] * 6] * 2
    assert read_slow(tmp_path) == [f"rank 2 on n2: {reason}"]


def test_ranks_are_compared_by_their_means_where_a_record_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = list[tuple[int, float, float]]()

    def look(_: Stragglers, step: int, *, reading: float, step_seconds: float) -> list[str]:
        looks.append((step, reading, step_seconds))
        return [f"slow at step {step}"]

    monkeypatch.setattr(Stragglers, "look", look)
    watch = Stragglers(tmp_path, HOSTS, rank=0, device=torch.device("cpu"))
    result = StepResult(loss=2.0, grad_norm=0.5, stop=False, saved=False, skipped=False)
    for step, loss, seconds, reading, is_logged in (
        (1, 2.0, 1.0, 0.25, False),
        (2, math.nan, 2.0, 0.5, True),  # has no record
        (3, math.nan, 0.0, 0.0, True),  # its data are left out
        (4, 2.0, 3.0, 0.75, True),
        (5, 2.0, 4.0, 0.0, True),
    ):
        state = ResumeState("digest", step, 8 * step, 1.0, 1)
        of_step = (state, result._replace(loss=loss), 0.01, 0.01, 8, seconds, reading, is_logged)
        watch.end_step(FinishedStep(*of_step))
    assert looks == [(4, 0.5, 2.0), (5, 0.0, 4.0)]
    assert capsys.readouterr().out == "slow at step 4\nslow at step 5\n"


def test_there_may_be_no_file(tmp_path: Path) -> None:
    assert read_slow(tmp_path) == []
    (tmp_path / stragglers.FILE).write_text("{")
    assert read_slow(tmp_path) == []


def test_a_product_takes_time() -> None:
    assert 0 < product_seconds(torch.device("cpu")) < 1


@pytest.mark.usefixtures("lone_rank")
def test_a_run_writes_the_times_of_its_ranks(root: Path) -> None:
    config = make_run(root, "timed", train_steps=2)
    assert train_here(config) == 0
    assert (read_run(config).output / stragglers.FILE).is_file()
    assert read_slow(read_run(config).output) == []
