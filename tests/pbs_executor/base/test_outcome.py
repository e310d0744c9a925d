"""Outcomes of watched jobs: success, failure, or a new submission."""

from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.session import EventKind
from snakemake_executor_plugin_pbs.base.states import JobState, JobStatus
from tests.support.pbs_simulated import SimulatedRun, SimulatedServer, same_rule


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("never", EventKind.FAILED, "can never run: too large"),
        ("refused", EventKind.FAILED, "was refused by qsub: Unauthorized Request"),
        ("bad", EventKind.FAILED, "failed with exit status 1"),
        ("good", EventKind.SUCCEEDED, "finished"),
    ],
)
def test_the_message_says_how_the_job_ended(
    tmp_path: Path, server: SimulatedServer, name: str, kind: EventKind, words: str
) -> None:
    server.failing = {"bad"}
    run = SimulatedRun(tmp_path, server, [name])
    run.until_all_ended()
    assert run.outcome(name)[0] is kind
    assert words in run.outcome(name)[1]
    assert not any(job.state != "F" for job in server.jobs.values())


def test_the_exit_status_file_decides_if_the_server_goes_down(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = SimulatedRun(tmp_path, server, ["a"], patience=300.0)
    run.step(seconds=0.0)
    server.jobs[100].start = server.now + 25
    run.step()
    run.step(seconds=0.0)
    assert run.tracker.tasks["k-a"].evidence.status == JobStatus(JobState.WAITING, "queued")
    server.down = True
    run.until_all_ended(rounds=100)
    assert run.outcome("a")[0] is EventKind.SUCCEEDED
    assert "according to its exit-status file" in run.outcome("a")[1]


def test_a_held_job_waits_and_is_reported_once(tmp_path: Path, server: SimulatedServer) -> None:
    run = SimulatedRun(tmp_path, server, ["held"])
    for _ in range(100):
        run.step()
    assert not run.ended
    assert sum("held by a user" in text and "qrls 100.pbs01" in text for text in run.warnings) == 1
    server.jobs[100].held = False
    run.until_all_ended()
    assert run.outcome("held")[0] is EventKind.SUCCEEDED


def test_a_deleted_job_failed_although_its_exit_status_is_0(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 10**6
    run = SimulatedRun(tmp_path, server, ["a"])
    run.until(lambda: server.jobs and server.jobs[100].state == "R")
    server.delete(["100.pbs01"])
    assert server.jobs[100].exit == 0
    run.until_all_ended()
    assert run.outcome("a") == (EventKind.FAILED, "was deleted while running")
    assert not run.ended["a"].retry


def test_a_lost_job_fails_only_after_the_patience(tmp_path: Path, server: SimulatedServer) -> None:
    server.seconds = 10**6
    run = SimulatedRun(tmp_path, server, ["a"])
    run.until(lambda: server.jobs and server.jobs[100].state == "R")
    server.jobs.clear()  # the server lost its data
    server.active.clear()
    start = server.now
    run.until_all_ended()
    assert server.now - start >= run.limits.patience
    assert "is lost" in run.outcome("a")[1]


@pytest.mark.parametrize(
    ("most", "num_tasks", "purge_after"),
    [(4, 10, 1e9), (2, 4, 0.0)],
    ids=["with history", "without history"],
)
def test_tasks_that_a_bundle_did_not_start_are_submitted_again(
    tmp_path: Path, server: SimulatedServer, most: int, num_tasks: int, purge_after: float
) -> None:
    server.most_members, server.purge_after = most, purge_after
    run = SimulatedRun(tmp_path, server, same_rule(num_tasks), queued={"debug": 1})
    run.until_all_ended()
    assert {event.kind for event in run.ended.values()} == {EventKind.SUCCEEDED}
    assert set(server.done.values()) == {1}
    assert [len(job.members) for job in server.jobs.values()] == [*range(num_tasks, 0, -most)]


def test_each_task_of_a_bundle_has_its_own_outcome(tmp_path: Path, server: SimulatedServer) -> None:
    server.failing = {"work"}
    run = SimulatedRun(tmp_path, server, same_rule(3), queued={"debug": 1})
    run.until_all_ended()
    assert {run.outcome(name) for name in same_rule(3)} == {
        (EventKind.FAILED, "failed with exit status 1")
    }


def test_tasks_that_a_deleted_bundle_finished_succeed_and_the_others_fail(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = SimulatedRun(tmp_path, server, same_rule(5), queued={"debug": 1})
    run.until(lambda: len(server.done) == 2)
    server.delete(["100.pbs01"])
    run.until_all_ended()
    done = [run.outcome(name)[0] is EventKind.SUCCEEDED for name in same_rule(5)]
    assert done == [True, True, False, False, False]
    waiting = "had not started when the job that it shares was deleted"
    assert [run.outcome(name)[1] for name in same_rule(5)[2:]] == [
        "was deleted while running", waiting, waiting,
    ]  # fmt: skip
    assert not any(run.ended[name].retry for name in same_rule(5)[2:])
    assert len(server.jobs) == 1


def test_a_task_that_failed_in_a_bundle_is_retried_alone(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.failing = {"work"}
    run = SimulatedRun(tmp_path, server, same_rule(3), queued={"debug": 1})
    run.until_all_ended()
    server.failing = set()
    again = same_rule(2)
    for name in again:  # as Snakemake's retries do
        del run.ended[name]
        run.tracker.add(run.task(name))
    run.names.append("work@debug#new")
    run.tracker.add(run.task("work@debug#new"))
    run.until_all_ended()
    assert [len(job.members) for job in server.jobs.values()] == [3, 1, 1, 1]


def test_without_history_a_success_is_a_plain_one(tmp_path: Path, server: SimulatedServer) -> None:
    server.purge_after = -1.0
    run = SimulatedRun(tmp_path, server, ["a"])
    run.until_all_ended()
    assert run.outcome("a") == (EventKind.SUCCEEDED, "finished")


@pytest.mark.parametrize("has_history", [True, False])
def test_tasks_of_a_deleted_bundle_that_had_not_started_say_so(
    tmp_path: Path, server: SimulatedServer, has_history: bool
) -> None:
    server.seconds = 10**6
    run = SimulatedRun(tmp_path, server, same_rule(3), queued={"debug": 1})
    run.until(lambda: bool(server.working))
    records = [task.record for task in run.tracker.tasks.values()]
    server.delete(["100.pbs01"])
    if not has_history:
        for record in filter(None, records):
            run.records.path(record, "term").write_text("1000 4600\n")
        server.jobs.clear()
    run.until_all_ended()
    texts = sorted(event.message for event in run.ended.values())
    assert texts[:2] == ["had not started when the job that it shares was deleted"] * 2
    assert texts[2].startswith("was deleted while running")
    assert not any(event.retry for event in run.ended.values())


@pytest.mark.parametrize("is_same", [True, False])
def test_a_refusal_is_retried_only_with_another_request(
    tmp_path: Path, server: SimulatedServer, is_same: bool
) -> None:
    run = SimulatedRun(tmp_path, server, ["refused"])
    [task] = run.tracker.tasks.values()
    task.next_request = lambda: task.request if is_same else replace(task.request, seconds=9)
    run.until_all_ended()
    assert run.ended["refused"].retry is not is_same
