"""The spawner of ranks that tests of layouts use: results, failures, deaths, time."""

import os
import signal
from collections.abc import Iterable
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.pbs_servers import wait_for
from tests.support.ranks import RanksFailed, spawn


def sums(number: int) -> tuple[torch.Tensor, int, str]:
    total = torch.tensor([float(number + dist.get_rank())])
    dist.all_reduce(total)
    return total, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def fails(how: str, folder: Path) -> None:
    """Rank 1 fails while rank 0 does what never ends."""
    (folder / str(dist.get_rank())).touch()
    if dist.get_rank() == 1 and how != "hang":
        wait_for(Path(folder, "0").exists, "rank 0 to be there")
        if how == "raise":
            raise ValueError("the reason")
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@pytest.mark.ranks
def test_every_rank_returns() -> None:
    for total, *threads in spawn(sums, 2, 1):
        torch.testing.assert_close(total, torch.tensor([3.0]))
        assert threads == [1, "1"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"fails on 2 ranks:\nrank 1 raised:\n(.*\n)*ValueError: the reason"),
        ("die", r"rank 1 died with exit code -9"),
        ("hang", r"rank 0 did not return in time and was killed\nrank 1 did not"),
    ],
)
def test_a_failed_rank_ends_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    limits: list[float] = []

    def awaited(running: Iterable[int], seconds: float) -> list:
        limits.append(seconds)
        if len(limits) == 2:
            return []  # rank 0 has not ended meanwhile
        if how != "hang":
            return wait(running, seconds)
        for rank in "01":
            wait_for(Path(tmp_path, rank).exists, f"rank {rank} to be there")
        return []  # the time is up

    monkeypatch.setattr(ranks, "wait", awaited)
    with pytest.raises(RanksFailed, match=said):
        spawn(fails, 2, how, tmp_path, timeout=600)
    assert len(limits) == (1 if how == "hang" else 2)
    assert ranks._GRACE_SECONDS < limits[0] <= 600
    if how != "hang":
        assert limits[1] <= ranks._GRACE_SECONDS  # not the ten minutes that others had
