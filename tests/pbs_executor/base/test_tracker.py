"""Tracker on a simulated PBS with all its faults: every job is done once, none is lost."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.commands import StatusReply, Unreachable, Unsure
from snakemake_executor_plugin_pbs.base.records import Records
from snakemake_executor_plugin_pbs.base.session import EventKind, Phase
from tests.support.pbs_simulated import INTERVAL, Faults, SimulatedRun, SimulatedServer, same_rule


def most_calls_an_interval(server: SimulatedServer) -> int:
    """Largest number of status calls of a single controller within one interval."""
    most, recent = 0, list[float]()
    for time in server.status_calls:
        recent = (
            []
            if time is None
            else [earlier for earlier in recent if time - earlier < INTERVAL] + [time]
        )
        most = max(most, len(recent))
    return most


@pytest.mark.grid
@pytest.mark.slow
def test_ten_thousand_jobs_with_every_fault_are_done_once_each(tmp_path: Path) -> None:
    server = SimulatedServer(
        random.Random(7),
        Faults(
            silent=0.1, truncated=0.1, first=0.05, lying=0.1, lost=0.002, killed=0.001, full=0.001
        ),
        purge_after=60,
        failing={"bad"},
    )
    names = [f"{'bad' if place % 500 == 7 else 'good'}{place}" for place in range(10_000)]
    run = SimulatedRun(tmp_path, server, names, patience=300.0)
    run.until_all_ended(rounds=1500)
    wrong = [
        name
        for name in names
        if (run.ended[name].kind is EventKind.FAILED) != name.startswith("bad")
    ]
    assert wrong == []
    # The work of each job was done once, and never twice at a time. A new controller repeats work
    # that failed.
    work = Counter({path.name.removeprefix("k-"): times for path, times in server.done.items()})
    assert {name: work[name] for name in names if work[name] != 1 and name[0] == "g"} == {}
    assert all(1 <= work[name] <= 1 + run.num_kills for name in names if name[0] == "b")
    assert server.overlaps == 0
    assert run.num_kills > 3
    assert not any(job.state != "F" for job in server.jobs.values())
    assert most_calls_an_interval(server) == 1


class HangingServer(SimulatedServer):
    """Server whose calls time out without an answer."""

    hangs = False
    finds = 0

    def submit(self, arguments: Sequence[str], script: Path) -> str:
        if not self.hangs:
            return super().submit(arguments, script)
        self.now += 60
        raise Unsure("no answer in 60 s")

    def status(self, ids: Sequence[str]) -> StatusReply:
        self.now += 60 * self.hangs
        return StatusReply(fault="no answer in 60 s") if self.hangs else super().status(ids)

    def find(self, name: str) -> list[str]:
        self.finds += 1
        if self.hangs:
            self.now += 60
            raise Unreachable("no answer in 60 s")
        return super().find(name)


def test_a_server_that_hangs_gets_one_call_of_each_kind_per_step(tmp_path: Path) -> None:
    server = HangingServer(random.Random(1), seconds=10**6)
    run = SimulatedRun(tmp_path, server, ["a", "b"])
    run.until(lambda: [job.state for job in server.jobs.values()] == ["R", "R"])
    server.hangs = True
    for place in range(20):
        run.tracker.add(run.task(f"late{place}"))
    for _ in range(30):
        start = server.now
        run.step(seconds=0.0)
        assert server.now - start <= 180  # one call of each kind
    unsure = [task for task in run.tracker.tasks.values() if task.phase is Phase.FINDING]
    assert len(unsure) == 1
    start, server.finds = server.now, 0
    assert run.tracker.cancel(sleep=lambda _: None) == []
    assert server.finds == 1
    assert server.now - start == 60
    assert {job.state for job in server.jobs.values()} == {"F"}


def test_cancel_deletes_all_jobs_if_a_submission_never_arrived(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 10**6
    run = SimulatedRun(tmp_path, server, ["a", "b", "c"])
    run.until(lambda: [job.state for job in server.jobs.values()] == ["R"] * 3)
    server.down = True
    run.tracker.add(run.task("never-there"))
    run.step()
    assert run.tracker.tasks["k-never-there"].phase is Phase.FINDING
    server.down = False
    server.now += 1000
    assert run.tracker.cancel() == []
    assert not any(job.state != "F" for job in server.jobs.values())


def test_cancel_deletes_all_jobs_if_the_disk_is_full(
    tmp_path: Path, server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.seconds = 10**6
    run = SimulatedRun(tmp_path, server, ["a", "b"])
    run.until(lambda: [job.state for job in server.jobs.values()] == ["R", "R"])

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "record.json")

    monkeypatch.setattr(Records, "write", fail)
    assert run.tracker.cancel() == ["record.json: No space left on device"] * 2
    assert not any(job.state != "F" for job in server.jobs.values())


def test_the_next_run_recovers_jobs_that_cancel_could_not_delete(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 500
    run = SimulatedRun(tmp_path, server, ["a", "b", "c"])
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    server.down = True  # at the worst moment
    wrong = run.tracker.cancel(sleep=lambda _: None)
    assert "qdel 100.pbs01 101.pbs01 102.pbs01: Connection refused" in wrong
    server.down = False
    run.kill()
    run.until_all_ended()
    assert {event.kind for event in run.ended.values()} == {EventKind.SUCCEEDED}
    assert server.overlaps == 0
    assert set(server.done.values()) == {1}


def test_cancel_of_a_healthy_server_leaves_no_job(tmp_path: Path, server: SimulatedServer) -> None:
    run = SimulatedRun(tmp_path, server, [f"j{place}" for place in range(500)])
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    assert run.tracker.cancel() == []
    assert not any(job.state != "F" for job in server.jobs.values())


def test_cancel_deletes_a_bundle_once(tmp_path: Path, server: SimulatedServer) -> None:
    run = SimulatedRun(tmp_path, server, same_rule(3), queued={"debug": 1})
    run.until(lambda: bool(server.working))
    deleted: list[Sequence[str]] = []
    server.delete = lambda ids: deleted.append(ids) or ""  # type: ignore[method-assign]
    assert run.tracker.cancel() == []
    assert deleted == [["100.pbs01"]]
