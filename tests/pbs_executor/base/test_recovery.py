"""Recovery: submissions of earlier controllers, and submissions without an id."""

import os
from collections import Counter
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.session import EventKind
from tests.support.pbs_simulated import SimulatedJob, SimulatedRun, SimulatedServer, same_rule


def test_a_submission_without_an_answer_is_looked_up_and_not_repeated(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.faults.lost = 1.0
    run = SimulatedRun(tmp_path, server, [f"j{place}" for place in range(20)])
    run.step()
    assert len([task for task in run.tracker.tasks.values() if task.record]) == 1
    run.until(lambda: len(server.jobs) > 5)
    server.faults.lost = 0.0
    run.until_all_ended()
    assert len(server.jobs) == 20
    assert set(server.done.values()) == {1}


def test_a_submission_that_arrives_after_it_was_given_up_does_nothing(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.faults.lost = 1.0
    run = SimulatedRun(tmp_path, server, ["late"])
    server.takes_lost = True
    run.step(seconds=0.0)
    [late] = server.jobs.values()
    late.held = True
    server.active.discard(late.number)  # not to be seen yet
    server.faults.lost = 0.0
    run.until(lambda: len(server.jobs) == 2)
    server.active.add(late.number)
    late.held = False
    run.until_all_ended()
    run.until(lambda: late.state == "F")
    assert late.idle
    assert set(server.done.values()) == {1}


def test_a_submission_that_arrives_late_is_found(tmp_path: Path, server: SimulatedServer) -> None:
    server.faults.lost, server.takes_lost = 1.0, True
    run = SimulatedRun(tmp_path, server, ["late"])
    run.step()
    [late] = server.jobs.values()
    server.active.discard(late.number)  # not to be seen yet
    server.faults.lost = 0.0
    for _ in range(5):
        run.step()
    server.active.add(late.number)
    run.until_all_ended()
    assert len(server.jobs) == 1


def test_running_jobs_are_found_again_after_kill_9(tmp_path: Path, server: SimulatedServer) -> None:
    run = SimulatedRun(tmp_path, server, ["a", "b", "c"])
    server.seconds = 500
    run.until(lambda: Counter(job.state for job in server.jobs.values())["R"] >= 2)
    for _ in range(3):
        run.kill()
        run.step()
    run.until_all_ended()
    assert len(server.jobs) == 3
    assert {event.kind for event in run.ended.values()} == {EventKind.SUCCEEDED}
    assert not list(tmp_path.iterdir())  # nothing is left of jobs that are done


def test_a_job_that_ended_before_the_controller_started_is_done_again(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = SimulatedRun(tmp_path, server, ["a"])
    run.step()
    server.pass_time(1000)  # nobody looks; Snakemake then wants it all the same
    [done] = server.done
    for path in done.glob("*.exit"):
        os.utime(path, (server.now - 500, server.now - 500))
    run.start()
    run.until_all_ended()
    assert len(server.jobs) == 2


def test_a_job_that_ended_after_the_controller_started_counts(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = SimulatedRun(tmp_path, server, ["a"])
    run.step()
    run.kill()
    server.pass_time(1000)
    run.until_all_ended()
    assert len(server.jobs) == 1
    assert run.outcome("a")[0] is EventKind.SUCCEEDED


def test_a_job_with_other_inputs_ends_before_a_new_one_is_submitted(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 500
    run = SimulatedRun(tmp_path, server, ["a"])
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    run.fingerprints["a"] = "other inputs"
    run.kill()
    run.until_all_ended()
    first, second = server.jobs.values()
    assert (first.substate, second.substate) == (91, 92)
    assert server.overlaps == 0
    assert any("other inputs" in text for text in run.warnings)


def test_a_group_with_other_rules_ends_before_a_part_of_it_is_submitted(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 500
    run = SimulatedRun(tmp_path, server, [])
    run.tracker.add(run.task("whole", ("/out/1", "/out/2")))
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    run.start()
    run.names = ["part"]
    run.tracker.add(run.task("part", ("/out/2",)))
    server.slow_to_delete = True
    for _ in range(20):
        run.step()
    assert len(server.jobs) == 1
    server.end(server.jobs[100], 91, 0)
    run.until_all_ended()
    assert len(server.jobs) == 2


def test_a_bundle_is_found_again_after_kill_9(tmp_path: Path, server: SimulatedServer) -> None:
    run = SimulatedRun(tmp_path, server, same_rule(6), queued={"debug": 1})
    run.until(lambda: len(run.ended) == 2)
    run.start()  # another controller, in place of the first
    run.until_all_ended()
    assert {event.kind for event in run.ended.values()} == {EventKind.SUCCEEDED}
    assert set(server.done.values()) == {1}
    assert len(server.jobs) == 1


def test_a_bundle_without_an_answer_is_found(tmp_path: Path, server: SimulatedServer) -> None:
    server.faults.lost, server.takes_lost = 1.0, True
    run = SimulatedRun(tmp_path, server, same_rule(4), queued={"debug": 1})
    run.step()
    server.faults.lost = 0.0
    run.until_all_ended()
    assert set(server.done.values()) == {1}
    assert len(server.jobs) == 1


def test_a_bundle_skips_a_task_whose_inputs_changed(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = SimulatedRun(tmp_path, server, same_rule(4), queued={"debug": 1})
    run.until(lambda: len(run.ended) == 1)
    run.fingerprints[same_rule(4)[3]] = "other inputs"
    run.start()
    run.until_all_ended()
    assert {event.kind for event in run.ended.values()} == {EventKind.SUCCEEDED}
    assert set(server.done.values()) == {1}
    assert [len(job.members) for job in server.jobs.values()] == [4, 1]
    assert server.overlaps == 0


def test_a_bundle_is_deleted_if_the_inputs_of_its_running_task_changed(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 1000.0
    run = SimulatedRun(tmp_path, server, same_rule(3), queued={"debug": 1})
    run.until(lambda: bool(server.working))
    run.fingerprints[same_rule(3)[0]] = "other inputs"
    run.start()
    run.until_all_ended(2000)
    assert {event.kind for event in run.ended.values()} == {EventKind.SUCCEEDED}
    assert set(server.done.values()) == {1}
    assert server.overlaps == 0
    assert server.jobs[100].substate == 91


def test_an_old_failure_in_a_bundle_is_not_a_failure_for_a_new_controller(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = SimulatedRun(tmp_path, server, same_rule(3), queued={"debug": 1})
    run.until(lambda: bool(server.working))
    record = run.tracker.tasks[f"k-{same_rule(3)[0]}"].record
    assert record
    exit_file = run.records.path(record, "exit")
    run.until(exit_file.exists)
    exit_file.write_text("1\n")
    os.utime(exit_file, (server.now - 1, server.now - 1))
    run.start()  # the user fixed the cause and starts Snakemake again
    run.until_all_ended()
    assert {event.kind for event in run.ended.values()} == {EventKind.SUCCEEDED}
    assert server.overlaps == 0


@pytest.mark.parametrize("change", ["same inputs", "other inputs", "cancelled before an answer"])
def test_a_job_that_has_the_id_of_ours_on_a_new_server_is_left_alone(
    tmp_path: Path, server: SimulatedServer, change: str
) -> None:
    server.seconds = 500
    run = SimulatedRun(tmp_path, server, ["a"])
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    server.jobs.clear()  # a new server, which counts from the same number
    server.working.clear()
    other = SimulatedJob(100, "theirs", "", [], server.now, 10**6, 0, state="R", substate=42)
    server.jobs[100] = other
    server.active.clear()
    if change == "other inputs":
        run.fingerprints["a"] = change
    run.start()
    if change == "cancelled before an answer":
        [error] = run.tracker.cancel(sleep=lambda _: None)
        assert "100.pbs01 of an earlier run" in error
    else:
        run.until_all_ended()
        assert run.outcome("a")[0] is EventKind.SUCCEEDED
        assert any("is now another job, theirs" in text for text in run.warnings)
        assert len(server.jobs) == 2
    assert (other.state, other.substate) == ("R", 42)


def test_an_id_that_is_given_again_while_the_controller_watches_is_left_alone(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 500
    run = SimulatedRun(tmp_path, server, ["a"])
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    server.jobs[100].name = "theirs"
    run.step()
    run.tracker.cancel(sleep=lambda _: None)
    assert server.jobs[100].state == "R"
