"""Outcomes of watched jobs: success, failure, or a new submission."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.session import EventKind
from snakemake_executor_plugin_pbs.base.states import JobState, JobStatus
from snakemake_executor_plugin_pbs.commands import PBS
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


def test_work_that_progresses_continues_without_a_failure(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.failing = {"train"}
    server.progress = ["saved at step 10", "saved at step 20", "saved at step 20"]
    run = SimulatedRun(tmp_path, server, ["train"])
    run.until_all_ended()
    assert len(server.jobs) == 3
    assert [text for text in run.warnings if "a new job continues" in text] == [
        f"job {number}.pbs01 of rule train failed with exit status 1; saved at step {step}; "
        "a new job continues"
        for number, step in ((100, 10), (101, 20))
    ]
    words = "failed with exit status 1; saved at step 20, run Snakemake again to continue"
    assert run.outcome("train") == (EventKind.FAILED, words)
    assert run.ended["train"].retry


def test_work_that_would_fail_again_is_neither_retried_nor_continued(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.failing, server.progress = {"train"}, ["saved at step 10"]
    run = SimulatedRun(tmp_path, server, ["train"])
    run.until(lambda: bool(server.working))
    record = run.tracker.tasks["k-train"].record
    assert record
    run.records.path(record, "failure").touch()
    run.until_all_ended()
    words = "failed with exit status 1; a retry would fail in the same way, so there is none"
    assert run.outcome("train") == (EventKind.FAILED, words)
    assert not run.ended["train"].retry
    assert len(server.jobs) == 1


def test_a_new_controller_knows_the_progress_of_earlier_jobs(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.failing = {"train"}
    server.progress = ["saved at step 10", "saved at step 10"]
    run = SimulatedRun(tmp_path, server, ["train"])
    run.until(lambda: len(server.jobs) == 2)
    run.start()
    run.until_all_ended()
    assert len(server.jobs) == 2
    assert "saved at step 10, run Snakemake again" in run.outcome("train")[1]


def test_deleted_work_is_not_submitted_again_although_it_progressed(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds, server.progress = 10**6, ["saved at step 10"]
    run = SimulatedRun(tmp_path, server, ["train"])
    run.until(lambda: bool(server.working))
    server.delete(["100.pbs01"])
    run.until_all_ended()
    words = "was deleted while running; saved at step 10, run Snakemake again to continue"
    assert run.outcome("train") == (EventKind.FAILED, words)
    assert not run.ended["train"].retry
    assert len(server.jobs) == 1


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


def without(arguments: Sequence[str], hosts: Sequence[str]) -> tuple[str, ...]:
    return (*arguments, f"--without={','.join(hosts)}")


AVOIDING = replace(PBS, avoid=without)


def withouts(server: SimulatedServer) -> list[str]:
    """Hosts that each submission leaves out."""
    return [
        next((a.partition("=")[2] for a in arguments if a.startswith("--without")), "")
        for arguments in server.submit_options
    ]


def test_new_jobs_leave_out_hosts_that_the_work_found_faulty(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.failing = {"a"}
    server.progress = ["saved at step 1", "saved at step 2", "saved at step 3", "saved at step 3"]
    server.faulty = ["n1", "n1\nn2", "no;host $x"]
    run = SimulatedRun(tmp_path, server, ["a"], dialect=AVOIDING)
    run.until(lambda: len(server.submit_options) == 2)
    run.kill()  # a new controller knows it, too
    run.until_all_ended()
    assert withouts(server) == ["", "n1", "n1,n2", "n1,n2"]
    assert [text for text in run.warnings if "faulty" in text] == [
        "job 100.pbs01 of rule a found hosts faulty: n1; its next jobs do not use them",
        "job 101.pbs01 of rule a found hosts faulty: n1, n2; its next jobs do not use them",
    ]
    del run.ended["a"]  # Snakemake's retry
    server.failing = set()
    run.tracker.add(run.task("a"))
    run.until_all_ended()
    assert withouts(server)[-1] == "n1,n2"
    assert run.outcome("a")[0] is EventKind.SUCCEEDED


def test_a_job_uses_faulty_hosts_if_there_are_too_few_others(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.failing = {"a"}
    server.progress, server.faulty = ["saved at step 1", "saved at step 1"], ["n1"]
    server.refuses_options = "--without"
    run = SimulatedRun(tmp_path, server, ["a"], dialect=AVOIDING)
    run.until_all_ended()
    assert withouts(server) == ["", "n1", ""]
    assert "rule a: qsub refuses a job without n1 (not available); it may use them" in run.warnings


def test_pbs_only_names_faulty_hosts(tmp_path: Path, server: SimulatedServer) -> None:
    server.failing, server.faulty = {"a"}, ["n1"]
    run = SimulatedRun(tmp_path, server, ["a"])
    run.until_all_ended()
    assert any("PBS cannot leave them out; tell the site" in text for text in run.warnings)


def forgotten(run: SimulatedRun, server: SimulatedServer, *, left: float, exit_status: int) -> None:
    """A server without history forgets a job that got SIGTERM some seconds before its end."""
    run.until(lambda: bool(server.working))
    record = run.tracker.tasks["k-train"].record
    assert record
    run.records.path(record, "term").write_text(f"1000 {1000 + left:.0f}\n")
    run.records.path(record, "exit").write_text(f"{exit_status}\n")
    server.jobs.clear()
    server.active.clear()
    server.working.clear()


@pytest.mark.parametrize(
    ("left", "words", "num_jobs"),
    [
        (3000.0, "was deleted while running, 3000 s before its end; saved at step 10, run", 1),
        (-2.0, "used more than it requested and was killed by PBS: walltime; raise runtime", 2),
    ],
)
def test_without_history_the_job_itself_tells_a_deletion_from_the_end_of_its_time(
    tmp_path: Path, server: SimulatedServer, left: float, words: str, num_jobs: int
) -> None:
    server.seconds, server.progress = 10**6, ["saved at step 10"]
    run = SimulatedRun(tmp_path, server, ["train"])
    forgotten(run, server, left=left, exit_status=1)
    run.until(lambda: bool(run.ended) or run.submitted["train"] == 2)
    assert run.submitted["train"] == num_jobs
    texts = [run.outcome("train")[1]] if run.ended else run.warnings
    assert words in texts[-1]
    assert not (run.ended and run.ended["train"].retry)


def test_without_history_a_success_is_a_plain_one(tmp_path: Path, server: SimulatedServer) -> None:
    server.purge_after = -1.0
    run = SimulatedRun(tmp_path, server, ["a"])
    run.until_all_ended()
    assert run.outcome("a") == (EventKind.SUCCEEDED, "finished")


def test_work_that_stopped_in_time_has_not_failed(tmp_path: Path, server: SimulatedServer) -> None:
    server.failing = {"train"}
    line = "stopped before the end of the job, saved at step 10"
    server.progress = [line, line]
    run = SimulatedRun(tmp_path, server, ["train"])
    run.until_all_ended()
    assert run.warnings == [f"job 100.pbs01 of rule train {line}; a new job continues"]


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
