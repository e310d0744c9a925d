"""Failed tasks are submitted again if their work progressed, and not on faulty hosts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.session import EventKind
from snakemake_executor_plugin_pbs.commands import PBS
from tests.support.pbs_simulated import SimulatedRun, SimulatedServer


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


def test_work_that_stopped_in_time_has_not_failed(tmp_path: Path, server: SimulatedServer) -> None:
    server.failing = {"train"}
    line = "stopped before the end of the job, saved at step 10"
    server.progress = [line, line]
    run = SimulatedRun(tmp_path, server, ["train"])
    run.until_all_ended()
    assert run.warnings == [f"job 100.pbs01 of rule train {line}; a new job continues"]
