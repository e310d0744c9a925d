"""Script of a job: which jobs may run it, and which files it writes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.records import Record, Records
from snakemake_executor_plugin_pbs.base.script import NO_RESULT, NOT_OURS, script
from tests.support.pbs_servers import wait_for

RECORD = Record("tok", "name.tok", "key", ("/out",), "f")


@pytest.fixture
def records(tmp_path: Path) -> Records:
    records = Records(tmp_path / "it's a folder")
    records.write(RECORD)
    return records


def prepare(records: Records, body: str) -> Path:
    path = records.path(RECORD, "sh")
    path.write_text(script([(path.parent, RECORD.token)], "PBS_JOBID"))
    records.path(RECORD, "job").write_text(f"{body}\n")
    return path


def run(records: Records, body: str, job_id: str = "1.server") -> int:
    path = prepare(records, body)
    return subprocess.run(
        ["bash", path], env={**os.environ, "PBS_JOBID": job_id}, check=False
    ).returncode


@pytest.mark.parametrize("status", [0, 7])
def test_it_writes_its_exit_status_and_its_output(records: Records, status: int) -> None:
    assert records.exit_status(RECORD) is None
    assert run(records, f"echo hello; echo bad >&2; exit {status}") == status
    assert records.exit_status(RECORD) == status
    assert records.path(RECORD, "log").read_text() == "hello\nbad\n"
    assert records.claimed_by(RECORD) == "1.server"


def test_the_job_knows_when_its_walltime_ends(records: Records) -> None:
    path = prepare(records, 'echo "$(($PBS_JOB_END_TIME - $(date +%s)))"')
    path.write_text(script([(path.parent, RECORD.token)], "PBS_JOBID", seconds=5400))
    subprocess.run(["bash", path], env={**os.environ, "PBS_JOBID": "1.server"}, check=True)
    assert 5000 <= int(records.path(RECORD, "log").read_text()) <= 5400


def test_the_job_knows_its_image(records: Records) -> None:
    image = "docker:me/my image:1"
    path = prepare(records, 'echo "$JOB_CONTAINER"')
    path.write_text(script([(path.parent, RECORD.token)], "PBS_JOBID", container=image))
    subprocess.run(["bash", path], env={**os.environ, "PBS_JOBID": "1.server"}, check=True)
    assert records.path(RECORD, "log").read_text() == f"{image}\n"


def test_a_submission_that_was_given_up_does_nothing(records: Records) -> None:
    assert records.give_up(RECORD)
    assert run(records, "echo done") == NOT_OURS
    assert not records.path(RECORD, "log").exists()
    assert records.exit_status(RECORD) is None


def test_another_job_of_the_same_submission_does_nothing(records: Records) -> None:
    assert run(records, "echo first") == 0
    assert run(records, "echo second", "2.server") == NOT_OURS
    assert records.path(RECORD, "log").read_text() == "first\n"


def test_a_job_that_pbs_reruns_does_its_work_again(records: Records) -> None:
    assert run(records, "exit 1") == 1
    # The exit status of the first run is removed.
    assert run(records, f"test ! -e {str(records.path(RECORD, 'exit'))!r}") == 0
    assert records.exit_status(RECORD) == 0


@pytest.mark.parametrize("change", ["deleted", "of another submission"])
def test_a_job_without_its_own_record_does_nothing(records: Records, change: str) -> None:
    records.drop(RECORD, keep_files=True)
    if change != "deleted":
        records.write(Record("other", "name.other", "key", ("/out",), "f"))
    assert run(records, "echo done") == NOT_OURS
    assert not records.path(RECORD, "log").exists()


def test_it_fails_if_it_cannot_write_its_exit_status(records: Records) -> None:
    part = records.path(RECORD, "exit").with_suffix(".exit.part")
    part.mkdir()
    assert run(records, "true") == NO_RESULT


def test_a_job_that_gets_sigterm_writes_its_exit_status(records: Records, tmp_path: Path) -> None:
    path = prepare(records, f"trap 'exit 75' TERM; touch '{tmp_path}/started'; sleep 60 & wait")
    process = subprocess.Popen(
        ["bash", path], env={**os.environ, "PBS_JOBID": "1.server"}, start_new_session=True
    )
    wait_for((tmp_path / "started").exists, "the job to start")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == 75
    assert records.exit_status(RECORD) == 75


def test_a_job_writes_down_at_once_when_it_was_told_to_end(
    records: Records, tmp_path: Path
) -> None:
    """PBS kills it some seconds later, whether its work has ended or not."""
    wait = f"while [ ! -e '{tmp_path}/go' ]; do sleep 0.05; done"
    body = f"trap '' TERM; touch '{tmp_path}/started'; {wait}"
    path = prepare(records, body)
    path.write_text(script([(path.parent, RECORD.token)], "PBS_JOBID", seconds=5400))
    process = subprocess.Popen(["bash", path], env={**os.environ, "PBS_JOBID": "1.server"})
    wait_for((tmp_path / "started").exists, "the job to start")
    assert records.seconds_left(RECORD) is None
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: records.seconds_left(RECORD) is not None, "the note")
    assert 5000 <= (records.seconds_left(RECORD) or 0) <= 5400
    (tmp_path / "go").touch()
    assert process.wait(30) == 0
    assert records.exit_status(RECORD) == 0


SAVES = """
import pathlib, signal, sys

here = pathlib.Path(sys.argv[1])
signals = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # one that comes too soon waits for sigwait
(here / "started").touch()
signal.sigwait(signals)
(here / "saved").touch()
sys.exit(3)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_lasts_until_its_work_has_ended(
    records: Records, tmp_path: Path, number: signal.Signals
) -> None:
    """Otherwise PBS would kill work that still saves, or a second job would run in parallel."""
    (tmp_path / "work.py").write_text(SAVES)
    path = prepare(records, f"'{sys.executable}' '{tmp_path}/work.py' '{tmp_path}'")
    process = subprocess.Popen(
        ["bash", path], env={**os.environ, "PBS_JOBID": "1.server"}, start_new_session=True
    )
    wait_for((tmp_path / "started").exists, "the job to start")
    os.killpg(process.pid, number)
    assert process.wait(30) == 3
    assert (tmp_path / "saved").exists()
    assert records.exit_status(RECORD) == 3


def test_work_writes_its_progress(records: Records) -> None:
    assert records.progress(RECORD) == ""
    assert run(records, 'echo at step 1 > "$JOB_PROGRESS_FILE"; exit 3') == 3
    assert records.progress(RECORD) == "at step 1"


def test_work_notes_that_a_retry_would_fail_too(records: Records) -> None:
    assert run(records, 'touch "$JOB_FAILURE_FILE"; exit 1') == 1
    default = "a retry would fail in the same way, so there is none"
    assert records.reason_against_retry(RECORD) == default
    assert run(records, "exit 1") == 1  # the batch system reruns the job
    assert records.reason_against_retry(RECORD) == ""
    assert run(records, 'echo it was asked to > "$JOB_FAILURE_FILE"; exit 84') == 84
    assert records.reason_against_retry(RECORD) == "it was asked to"


BUNDLE = [Record(f"tok{n}", "name.tok0", f"key{n}", (f"/out{n}",), "f") for n in range(4)]


def run_bundle(records: Records, bodies: list[str], seconds: int | None = None) -> int:
    """Run the script of a bundle with the work of each submission; return its exit status."""
    for record, body in zip(BUNDLE, bodies, strict=False):
        records.write(record)
        records.path(record, "job").write_text(f"{body}\n")
    path = records.path(BUNDLE[0], "sh")
    submissions = [
        (records.path(record, "sh").parent, record.token) for record in BUNDLE[: len(bodies)]
    ]
    path.write_text(script(submissions, "PBS_JOBID", seconds=seconds))
    environment = {**os.environ, "PBS_JOBID": "1.server"}
    return subprocess.run(["bash", path], env=environment, check=False).returncode


def test_a_bundle_does_all_work_with_an_exit_status_each(records: Records) -> None:
    records.give_up(BUNDLE[2])
    assert run_bundle(records, ["echo a", "echo b; exit 7", "echo c", "echo d"], 5400) == 0
    assert [records.exit_status(record) for record in BUNDLE] == [0, 7, None, 0]
    assert records.path(BUNDLE[3], "log").read_text() == "d\n"


@pytest.mark.parametrize(("third", "last"), [(60, 0), (61, None)])
def test_a_bundle_starts_work_only_with_time_for_twice_the_longest_work(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: int, last: int | None
) -> None:
    """The second work takes 40 s of 141: with 81 s left another one starts, with 80 s none."""
    clock, now = tmp_path / "bin/date", tmp_path / "now"
    clock.parent.mkdir()
    clock.write_text(f"#!/bin/sh\ncat {now}\n")
    clock.chmod(0o755)
    now.write_text("0")
    monkeypatch.setenv("PATH", f"{clock.parent}:{os.environ['PATH']}")
    works = [f"echo {seconds} > {now}" for seconds in (10, 50, third, 62)]
    assert run_bundle(records, works, 141) == 0
    assert [records.exit_status(record) for record in BUNDLE] == [0, 0, 0, last]
    assert (records.claimed_by(BUNDLE[3]) is None) == (last is None)


def test_a_bundle_that_gets_sigterm_starts_no_other_work(records: Records) -> None:
    of_bundle = "$(cut -d' ' -f4 /proc/$PPID/stat)"
    assert run_bundle(records, [f"kill -TERM {of_bundle}; echo saved", "echo b"]) == 0
    assert records.path(BUNDLE[0], "log").read_text() == "saved\n"
    assert records.claimed_by(BUNDLE[1]) is None


def test_a_rerun_bundle_repeats_no_successful_work(records: Records) -> None:
    bodies = ["echo a", "[ -e again ] || exit 7", "echo c"]
    assert run_bundle(records, bodies) == 0
    assert [records.exit_status(record) for record in BUNDLE[:3]] == [0, 7, 0]
    records.path(BUNDLE[1], "job").write_text("echo b\n")
    path = records.path(BUNDLE[0], "sh")
    subprocess.run(["bash", path], env={**os.environ, "PBS_JOBID": "1.server"}, check=True)
    logs = [records.path(record, "log").read_text() for record in BUNDLE[:3]]
    assert logs == ["a\n", "b\n", "c\n"]
    assert records.exit_status(BUNDLE[1]) == 0
