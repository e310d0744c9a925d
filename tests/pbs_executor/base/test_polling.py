"""Status calls: their number, faults of the server, and the evidence from answers."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.commands import StatusReply
from snakemake_executor_plugin_pbs.base.session import EventKind
from tests.support.pbs_simulated import INTERVAL, SimulatedRun, SimulatedServer


def test_qstat_is_called_once_per_interval_for_any_number_of_jobs(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = SimulatedRun(tmp_path, server, [f"j{place}" for place in range(250)], chunk=100)
    for _ in range(200):
        run.step(seconds=1.0)
    times = server.status_calls
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) > 15
    assert min(gaps) >= INTERVAL
    run.until_all_ended()


def test_a_server_that_is_down_for_hours_fails_no_job(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 200
    run = SimulatedRun(tmp_path, server, ["a", "b"])
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    server.down = True
    server.seconds = 10**6
    long = max(server.jobs.values(), key=lambda job: job.start + job.seconds)
    long.seconds = 10**5
    for _ in range(360):
        run.step()
    assert f"k-{long.name.partition('.')[0]}" in run.tracker.tasks
    assert all(event.kind is EventKind.SUCCEEDED for event in run.ended.values())
    assert sum("jobs continue" in text for text in run.warnings) == 1
    server.down, long.seconds = False, 1
    run.until_all_ended()
    assert all(event.kind is EventKind.SUCCEEDED for event in run.ended.values())


def test_a_reply_with_none_of_the_jobs_is_reported(
    tmp_path: Path, server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimulatedRun(tmp_path, server, ["a"])
    run.step()
    monkeypatch.setattr(server, "status", lambda _: StatusReply())
    for _ in range(10):
        run.step()
    assert run.warnings == ["qstat: its reply has none of the jobs; jobs continue; retrying"]


def test_omitted_jobs_are_reported_once(
    tmp_path: Path, server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimulatedRun(tmp_path, server, ["a", "b"])
    run.step()
    status = server.status

    def omitting(ids: Sequence[str]) -> StatusReply:
        answer = status(ids)
        answer.omitted = len(answer.jobs)
        return answer

    monkeypatch.setattr(server, "status", omitting)
    run.until_all_ended()
    assert run.warnings == [
        "qstat omitted 2 of 2 jobs that the server knows; each omitted job is asked about again"
    ]


def test_a_requeued_job_has_no_exit_status(tmp_path: Path, server: SimulatedServer) -> None:
    server.seconds = 10**6
    run = SimulatedRun(tmp_path, server, ["a"])
    run.until(lambda: bool(server.working))
    task = run.tracker.tasks["k-a"]
    assert task.record
    run.records.path(task.record, "exit").write_text("143\n")
    run.step()
    assert task.evidence.exit_status == 143
    job = server.jobs[100]
    job.state, job.substate, job.start = "Q", 10, server.now + 10**6
    run.step()
    assert task.evidence.exit_status is None
