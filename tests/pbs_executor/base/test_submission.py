"""Submission: refusals, and tasks that share a job."""

from collections import Counter
from pathlib import Path

from snakemake_executor_plugin_pbs.base.session import EventKind
from tests.support.pbs_simulated import SimulatedRun, SimulatedServer, same_rule


def test_a_full_queue_is_tried_once_per_interval_and_leaves_no_files(
    tmp_path: Path, server: SimulatedServer
) -> None:
    names = [f"j{place}@{queue}" for place in range(30) for queue in ("debug", "prod")]
    run = SimulatedRun(tmp_path, server, names)
    server.faults.full = 1.0
    for _ in range(100):
        run.step()
    tries = Counter(queue for _, queue in server.submit_calls)
    assert tries == {"debug": 100, "prod": 100}
    assert not list(tmp_path.rglob("*.*"))
    # One of them may be what is too much, so that each has its turn.
    assert len({name for name, _ in server.submit_calls}) == len(names)
    assert [text for text in run.warnings if "would exceed" in text] == [
        f"queue {queue}: qsub: would exceed queue's limit: retrying" for queue in ("debug", "prod")
    ]
    server.faults.full = 0.0
    run.until_all_ended()
    assert set(server.done.values()) == {1}


def test_ready_tasks_of_a_rule_share_a_job_if_one_job_may_wait(
    tmp_path: Path, server: SimulatedServer
) -> None:
    names = [*same_rule(120), "other@debug", *same_rule(3, "prod")]
    run = SimulatedRun(tmp_path, server, names, queued={"debug": 1})
    run.until_all_ended(2000)
    assert {event.kind for event in run.ended.values()} == {EventKind.SUCCEEDED}
    assert set(server.done.values()) == {1}
    sizes = {(job.queue, job.name.partition(".")[0]): [] for job in server.jobs.values()}
    for job in server.jobs.values():
        sizes[job.queue, job.name.partition(".")[0]].append(len(job.members))
    assert sizes == {
        ("debug", "work_debug"): [100, 20],
        ("debug", "other_debug"): [1],
        ("prod", "work_prod"): [1, 1, 1],
    }
    assert not [*tmp_path.iterdir()]
