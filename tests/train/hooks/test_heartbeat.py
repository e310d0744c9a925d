"""Ranks that hang: those that lag are named, and the run ends with a status that is retried."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests.support.forked import STEP, TIMEOUT_SECONDS, Started, stopped_in, train
from tests.support.runs import losses, make_run
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import read_run
from tokamake.errors import FAULTY_HOSTS_VARIABLE
from tokamake.runtime.exit_status import HUNG
from tokamake.runtime.ranks import Ranks
from tokamake.train.hooks import FinishedStep, heartbeat
from tokamake.train.hooks.heartbeat import (
    FOLDER,
    Beat,
    Heartbeat,
    Report,
    Silence,
    describe,
    read_reports,
    suspects,
    write_report,
)
from tokamake.train.step_result import NO_RESULT

STACKS = "Thread 0x1 (most recent call first):\n"
HOSTS = ("n1", "n1", "n2", "n2")


def report(number: int, phase: str, call: str = "line 1 in wait") -> Report:
    return Report(Beat(number, phase, 7), call, f"{STACKS}  {call}")


def after(step: int) -> FinishedStep:
    state = ResumeState("digest", step, 8 * step, 1.0, 1)
    return FinishedStep(state, NO_RESULT, 0.01, 0.01, 8, 1.0, 0.0, is_logged=False)


def lines_of(reports: dict[int, Report]) -> list[str]:
    return describe(reports, HOSTS, folder=Path("hangs/1"), timeout="30 s").splitlines()


def test_ranks_with_fewer_notes_lag() -> None:
    reports = {rank: report(9, "trains") for rank in (0, 1, 3)}
    lines = lines_of({**reports, 2: report(8, "reads samples", "line 5 in read")})
    assert lines == [
        "tokamake train: no rank has made progress for 30 s; the run ends with 75; if the ranks "
        "are only slow, raise the setting",
        "  lags, reads samples after step 7: rank 2 on n2, in line 5 in read",
        "  waits, trains after step 7: rank 0 on n1, rank 1 on n1, rank 3 on n2, in line 1 in wait",
        "  stacks of 4 ranks: hangs/1",
        "rank 2 on n2:",
        *f"{STACKS}  line 5 in read".splitlines(),
        "rank 0 on n1:",
        *f"{STACKS}  line 1 in wait".splitlines(),
    ]


def test_ranks_without_a_report_lag() -> None:
    lines = lines_of({rank: report(9, "trains") for rank in (0, 1, 3)})
    assert lines[1] == "  lags, stopped or stuck, without a report: rank 2 on n2"
    assert lines[2].startswith("  waits, trains after step 7: rank 0 on n1, rank 1 on n1, rank 3")


@pytest.mark.parametrize(("num_silent", "end"), [(4, "rank 4 on n"), (6, "rank 4 on n and 2 more")])
def test_four_ranks_are_named_and_the_rest_is_counted(num_silent: int, end: str) -> None:
    hosts = ["n"] * (num_silent + 1)
    text = describe({0: report(9, "trains")}, hosts, folder=Path("f"), timeout="1 s")
    assert text.splitlines()[1].endswith(f", {end}")


def test_among_ranks_with_the_same_note_the_exception_comes_first() -> None:
    reports = {rank: report(9, "trains") for rank in (0, 1, 2)}
    lines = lines_of({**reports, 3: report(9, "trains", "line 2 in compute")})
    assert lines[1] == "  waits, trains after step 7: rank 3 on n2, in line 2 in compute"


@pytest.mark.parametrize(
    ("lagging", "hosts"),
    [
        ({2: 8}, ["n2"]),
        ({2: 8, 3: 7}, ["n2"]),
        ({2: None}, ["n2"]),
        ({0: 8, 2: None}, ["n2"]),  # one that does not even report
        ({}, []),
        ({1: 8, 2: 8}, []),  # both hosts: then it is no fault of one
    ],
)
def test_the_hosts_of_few_ranks_that_lag_are_suspects(
    lagging: dict[int, int | None], hosts: list[str]
) -> None:
    notes = {rank: lagging.get(rank, 9) for rank in range(4)}
    reports = {rank: report(note, "trains") for rank, note in notes.items() if note is not None}
    assert suspects(reports, HOSTS) == hosts


def test_a_report_has_the_note_and_the_call_of_a_rank(tmp_path: Path) -> None:
    write_report(tmp_path / "hangs" / "rank-3.txt", Beat(4, "saves", 2))
    ((rank, report),) = read_reports(tmp_path / "hangs").items()
    assert (rank, report.beat) == (3, Beat(4, "saves", 2))
    assert report.call.endswith("in write_report")
    assert "in test_a_report_has_the_note_and_the_call_of_a_rank" in report.stacks


def test_only_time_without_a_note_counts() -> None:
    first, second = Beat(0, "starts", 0), Beat(1, "starts", 0)
    silence = Silence(first, 0.0)
    assert silence.look(first, 5.0, interval=5.0) == 5
    assert silence.look(first, 10.0, interval=5.0) == 10
    assert silence.look(second, 15.0, interval=5.0) == 0
    assert silence.look(second, 5000.0, interval=5.0) == 10  # the process was suspended


def test_the_timeout_is_shorter_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = list[float]()
    monkeypatch.setattr(heartbeat, "set_group_timeouts", timeouts.append)
    watch = Heartbeat(tmp_path, Ranks(0, 1, 0, 1), hosts=["n1"], init_seconds=100, train_seconds=10)
    watch.set_group_timeouts()
    for step in (1, 2):
        watch.end_step(after(step))
    assert timeouts == [400, 310]
    watch.prepare("goes back to a checkpoint")
    watch.end_step(after(2))
    assert timeouts == [400, 310, 400, 310]


def test_the_executor_gets_the_hosts_of_ranks_that_lag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAULTY_HOSTS_VARIABLE, str(tmp_path / "faulty"))
    ranks, hosts = Ranks(0, 2, 0, 1), ["n1", "n2"]
    watch = Heartbeat(tmp_path / "hang", ranks, hosts=hosts, init_seconds=1, train_seconds=1)
    watch._report()
    assert "without a report: rank 1 on n2" in capfd.readouterr().err
    assert (tmp_path / "faulty").read_text() == "n2\n"


def stopped_soon_reported(method: str, rank: int, number: int) -> None:
    """Stop a rank in a call of a method; the other one waits one second for its report."""
    heartbeat._MAX_GRACE_SECONDS = 1.0
    stopped_in(method, rank, number)


@pytest.mark.fault("stopped rank")
@pytest.mark.ranks
@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.grid)])
def test_a_stopped_rank_is_named_and_the_run_can_be_retried(root: Path, stopped: int) -> None:
    config = make_run(root, f"stopped-{stopped}", train_timeout_seconds=4)
    fault = partial(stopped_soon_reported, STEP, stopped, 5)
    with Started(config, ranks=2, fault=fault) as started:
        waiting = started.processes[1 - stopped]
        waiting.join(TIMEOUT_SECONDS)
        assert waiting.exitcode == HUNG, started.printed
        printed = started.printed
    assert "no rank has made progress for 4 s (train.train_timeout_seconds); the run" in printed
    assert f"lags, stopped or stuck, without a report: rank {stopped} on" in printed
    assert f"waits, trains after step 4: rank {1 - stopped} on" in printed
    (folder,) = (read_run(config).output / FOLDER).iterdir()
    assert "in train_step" in (folder / f"rank-{1 - stopped}.txt").read_text()
    make_run(root, f"stopped-{stopped}")  # a busy machine may be slow
    assert "continuing at step" in train(config, ranks=2)
    assert len(losses(config)) == 6


DEEPSPEED = {"backend": "deepspeed", "zero_stage": 2}
PLACES = {
    "save": ("tokamake.train.backends.native:Engine.save", 2, "saves after step 4", {}),
    "write": ("torch.distributed.checkpoint:FileSystemWriter.write_data", 2, "after step", {}),
    "load": ("tokamake.train.backends.native:Engine.load", 1, "after step 0", {}),
    "validation": ("tokamake.train.backends.native:Engine.validate", 2, "validates after", {}),
    "DeepSpeed": ("tokamake.train.backends.deepspeed:Engine.train_step", 5, "trains", DEEPSPEED),
    "DeepSpeed save": ("tokamake.train.backends.deepspeed:Engine.save", 2, "saves", DEEPSPEED),
}
"""Method before whose call a rank stops, number of the call, what the other rank does, settings."""


@pytest.mark.fault("stopped rank")
@pytest.mark.ranks
@pytest.mark.grid
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_stopped_anywhere_is_named(root: Path, place: str) -> None:
    method, number, phase, settings = PLACES[place]
    name = f"stopped-in-{place.replace(' ', '-')}"
    if place == "load":
        config = make_run(root, name, **settings)
        train(config, ranks=2)
        (read_run(config).output / "latest").write_text("global_step4")
    init_seconds = 20 if place == "load" else 60  # the one that ends this wait
    timeouts = {"train_timeout_seconds": 5, "init_timeout_seconds": init_seconds}
    config = make_run(root, name, **settings, **timeouts)
    fault = partial(stopped_soon_reported, method, 1, number)
    with Started(config, ranks=2, fault=fault) as started:
        waiting = started.processes[0]
        waiting.join(TIMEOUT_SECONDS)
        assert waiting.exitcode == HUNG, started.printed
        printed = started.printed
    assert "lags, stopped or stuck, without a report: rank 1 on" in printed
    assert re.search(f"waits, .*{phase}.*: rank 0 on", printed), printed
    make_run(root, name, **settings)  # a busy machine may be slow
    train(config, ranks=2)
    assert len(losses(config)) == 6
