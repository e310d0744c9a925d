"""Groups of rules: each is one PBS job."""

import signal
from pathlib import Path

import pytest

from tests.support.pbs_servers import Controller, Pbs, wait_for

pytestmark = pytest.mark.slow

SNAKEFILE = """
rule all:
    input: "c", "d"

rule a:
    output: "a"
    resources: runtime=2
    shell: "echo a | tee -a started > a; while [ ! -s go ]; do sleep 0.05; done"

rule b:
    input: "a"
    output: "b"
    resources: runtime=3
    shell: "echo b >> started; [ -e fixed ] || {{ echo the reason >&2; exit 7; }}; cat a > b"

rule c:
    input: "b"
    output: "c"
    shell: "echo c >> started; cat b > c"

rule d:
    output: "d"
    shell: "echo d > d"
"""
GROUPS = ("--groups", *(f"{rule}=small" for rule in "abc"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "Snakefile").write_text(SNAKEFILE)
    (work / "pbs.yaml").write_text("queue: debug\nrules:\n  small: {queue: prod}\n")
    for name in ("go", "fixed"):
        (work / name).write_text("yes")
    return work


def names(pbs: Pbs) -> list[str]:
    return sorted(job["name"].rpartition(".")[0] for job in pbs.jobs())


def started(folder: Path) -> list[str]:
    path = folder / "started"
    return path.read_text().split() if path.exists() else []


def test_a_group_is_one_job_with_the_time_of_all(folder: Path, pbs: Pbs) -> None:
    controller = Controller(folder, pbs.environment, *GROUPS)
    assert controller.wait() == 0, controller.text
    assert (folder / "c").read_text() == "a\n"
    assert started(folder) == ["a", "b", "c"]
    assert names(pbs) == ["d", "small"]
    jobs = {job["name"].rpartition(".")[0]: job for job in pbs.jobs()}
    assert jobs["small"]["asked"]["walltime"] == "00:10:00"  # 2 and 3 from its rules, 5 by default
    # The user file has values for a group by its name.
    assert {name: job["queue"] for name, job in jobs.items()} == {"d": "debug", "small": "prod"}


@pytest.mark.grid
def test_a_failed_member_is_reported_and_the_group_is_done_again(folder: Path, pbs: Pbs) -> None:
    (folder / "fixed").unlink()
    controller = Controller(folder, pbs.environment, *GROUPS, "--keep-going", "--show-failed-logs")
    assert controller.wait() == 1
    assert "Error in group small" in controller.text
    assert "the reason" in controller.text
    assert (folder / "d").exists()
    assert started(folder) == ["a", "b"]
    (folder / "fixed").touch()
    controller = Controller(folder, pbs.environment, *GROUPS)
    assert controller.wait() == 0, controller.text
    assert (folder / "c").read_text() == "a\n"
    assert started(folder) == ["a", "b", "a", "b", "c"]
    assert names(pbs) == ["d", "small", "small"]


@pytest.mark.grid
def test_a_running_group_is_found_again(folder: Path, pbs: Pbs) -> None:
    (folder / "go").write_text("")
    controller = Controller(folder, pbs.environment, *GROUPS, "--", "c")
    wait_for(lambda: (folder / "a").exists(), "the first member's file")
    controller.signal(signal.SIGKILL)
    controller.process.wait()
    controller = Controller(
        folder, pbs.environment, *GROUPS, "--nolock", "--rerun-incomplete", "--", "c"
    )
    wait_for(lambda: "found again" in controller.text, "the job to be found")
    (folder / "go").write_text("go")
    assert controller.wait() == 0, controller.text
    assert names(pbs) == ["small"]
    assert started(folder) == ["a", "b", "c"]


def test_the_error_of_a_group_has_no_logs_of_an_earlier_job(folder: Path, pbs: Pbs) -> None:
    """Snakemake drops the message of a group, and shows old log files."""
    snakefile = SNAKEFILE.replace('output: "b"', 'output: "b"\n    log: "b.log"')
    (folder / "Snakefile").write_text(snakefile)
    (folder / "b.log").write_text("words of an earlier job\n")
    (folder / "pbs.yaml").write_text("queue: debug\nrules:\n  small: {queue: none}\n")
    controller = Controller(folder, pbs.environment, *GROUPS, "--show-failed-logs", "--", "c")
    assert controller.wait() == 1
    text = controller.text
    assert "Error in group small:\n    message: PBS job small." in text
    assert "was refused by qsub: Unknown queue (exit status 170)" in text
    assert "    rules: a, b, c\n" in text
    assert "None" not in text
    assert "earlier job" not in text


@pytest.mark.grid
def test_the_log_of_a_failed_group_is_shown(folder: Path, pbs: Pbs) -> None:
    snakefile = SNAKEFILE.replace('output: "b"', 'output: "b"\n    log: "b.log"')
    (folder / "Snakefile").write_text(snakefile.replace(">&2; exit 7", "> b.log; exit 7"))
    (folder / "fixed").unlink()
    controller = Controller(folder, pbs.environment, *GROUPS, "--show-failed-logs", "--", "c")
    assert controller.wait() == 1
    assert "failed with exit status 1" in controller.text
    assert "The end of b.log:\nthe reason\n" in controller.text


@pytest.mark.grid
def test_a_deleted_group_is_not_retried(folder: Path, pbs: Pbs) -> None:
    (folder / "go").write_text("")
    arguments = (*GROUPS, "--retries", "2", "--pbs-patience", "2", "--", "c")
    controller = Controller(folder, pbs.environment, *arguments)
    wait_for(lambda: (folder / "a").exists(), "the first member's file")
    pbs.run("qdel", pbs.jobs()[0]["id"])
    assert controller.wait() == 1
    assert "was deleted while running" in controller.text
    assert names(pbs) == ["small"]
