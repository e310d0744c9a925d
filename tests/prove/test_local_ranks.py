"""Ranks that are forks of this process: their errors, and signals to them and to this process."""

import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokamake.errors import UserError
from tokamake.prove.local_ranks import on_local_ranks
from tokamake.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks


def number(ranks: Ranks, **_: Any) -> list[str]:
    return [f"{ranks.rank} of {ranks.world_size}"]


def test_the_lines_of_rank_0_return() -> None:
    assert on_local_ranks(number, 2) == ["0 of 2"]


def refuse_on_rank_1(ranks: Ranks, **_: Any) -> list[str]:
    if ranks.rank == 1:
        raise UserError("no such setting")
    return []


def fail_on_rank_1(ranks: Ranks, **_: Any) -> list[str]:
    if ranks.rank == 1:
        raise ValueError("an error of ours")
    return []


def be_killed_on_rank_1(ranks: Ranks, **_: Any) -> list[str]:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return []


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (refuse_on_rank_1, UserError, "^no such setting$"),
        (fail_on_rank_1, RuntimeError, "ValueError: an error of ours"),
        (be_killed_on_rank_1, UserError, "rank 1 of 2 was killed by SIGKILL; .* --most-ranks"),
    ],
)
def test_an_error_of_a_rank_is_raised_here(work: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        on_local_ranks(work, 2)


class EndedError(Exception):
    """What the handler of a signal raises."""


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def handled(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handler raises an error, as those of the command line do."""

    def end(*_: object) -> None:
        raise EndedError

    before = signal.signal(request.param, end)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_while_ranks_start_ends_this_process_and_no_rank_reports_it(
    handled: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The terminal sends it to ranks, too; those that start later never see it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    forked, fork = list[int](), os.fork

    def fork_and_signal() -> int:
        if pid := fork():
            os.kill(pid, handled)
            if not forked:
                signal.raise_signal(handled)
            forked.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", fork_and_signal)
    with pytest.raises(EndedError):
        on_local_ranks(number, 3)
    assert len(forked) == 3
    assert not [*tmp_path.iterdir()]


def test_ranks_end_when_the_process_that_started_them_is_killed() -> None:
    """They hold the writing end of a pipe, which has an end when all of them have ended."""
    reading, writing = os.pipe()

    def wait(*_: Any, **__: Any) -> list[str]:
        os.write(writing, b"x")
        threading.Event().wait()
        return []

    if not (parent := os.fork()):
        try:
            on_local_ranks(wait, 2)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        assert [pipe.read(1), pipe.read(1)] == [b"x", b"x"]
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert select.select([pipe], [], [], 60)[0]
        assert not pipe.read(1)
