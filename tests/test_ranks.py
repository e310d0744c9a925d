"""The spawner of ranks that tests of layouts use: results, failures, deaths, time."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, spawn


def sums(number: int) -> tuple[torch.Tensor, int, str]:
    total = torch.tensor([float(number + dist.get_rank())])
    dist.all_reduce(total)
    return total, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def fails(how: str) -> None:
    """Rank 1 fails while rank 0 waits for it."""
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the reason")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    dist.barrier()


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
def test_a_failed_rank_ends_them_all(how: str, said: str) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=said):
        spawn(fails, 2, how, timeout=9)
    assert time.monotonic() - start < 60
