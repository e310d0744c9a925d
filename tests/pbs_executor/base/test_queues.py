"""Limits of queues: how many jobs wait, and how fast a free place is used."""

from collections import Counter
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.records import Record
from snakemake_executor_plugin_pbs.base.tracker import CROWDED_SECONDS
from tests.support.pbs_simulated import SimulatedRun, SimulatedServer, same_rule


def test_limits_of_queues_count_waiting_jobs(tmp_path: Path, server: SimulatedServer) -> None:
    names = [f"j{place}@{queue}" for queue in ("debug", "prod") for place in range(30)]
    run = SimulatedRun(tmp_path, server, names, queued={"debug": 2, "*": 5})
    most: Counter[str] = Counter()

    def all_ended() -> bool:
        nonlocal most
        most |= Counter(job.queue for job in server.jobs.values() if job.state == "Q")
        return len(run.ended) == len(names)

    run.until(all_ended)
    assert most == {"debug": 2, "prod": 5}
    assert set(server.done.values()) == {1}


def test_a_started_job_makes_room_before_the_next_status_call(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = SimulatedRun(tmp_path, server, ["a@debug", "b@debug"], queued={"debug": 1})
    run.step(0.0)
    server.jobs[100].start = server.now + 2 * CROWDED_SECONDS
    for _ in range(3):
        assert run.tracker.wait_seconds() == CROWDED_SECONDS
        assert len(server.jobs) == 1
        run.step(CROWDED_SECONDS)
    assert len(server.jobs) == 2
    assert not server.status_calls
    run.step(0.0)
    assert run.tracker.wait_seconds() > CROWDED_SECONDS  # nothing waits for room any more


def test_a_started_bundle_makes_room(tmp_path: Path, server: SimulatedServer) -> None:
    run = SimulatedRun(tmp_path, server, [*same_rule(3), "other@debug"], queued={"debug": 1})
    run.step(0.0)
    server.jobs[100].start = server.now + CROWDED_SECONDS
    run.step(CROWDED_SECONDS)
    assert len(server.jobs) == 1
    run.step(0.0)
    assert [len(job.members) for job in server.jobs.values()] == [3, 1]
    assert not server.status_calls


def test_claims_of_a_full_queue_are_read_once_per_round(
    tmp_path: Path, server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimulatedRun(tmp_path, server, [f"j{n}@prod" for n in range(500)], queued={"prod": 20})
    run.step(0.0)
    looked: list[Record] = []
    monkeypatch.setattr(run.records, "claimed_by", lambda record: looked.append(record))
    run.step(0.0)
    assert len(looked) == 20
