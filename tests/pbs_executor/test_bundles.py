"""Snakemake with a queue in which one job may wait, and work that is longer than a job."""

from pathlib import Path

import pytest

from tests.support.pbs_servers import Controller, Pbs, wait_for

pytestmark = pytest.mark.slow

SNAKEFILE = """
rule all:
    input: expand("out/{n}", n=range(10))

rule work:
    output: "out/{n}"
    shell:
        "echo $PBS_JOBID >> started.{wildcards.n}; "
        "[ {wildcards.n} != 7 -o -e fixed ] && touch {output}"

rule train:
    output: "model"
    shell:
        "n=$(($(cat step 2>/dev/null || echo 0) + 1)); [ $n -le 3 ] && echo $n > step && "
        "echo saved at step $n > $JOB_PROGRESS_FILE; [ -e long ] && sleep 600; "
        "[ -e enough -a $n -ge 3 ] && touch {output}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "Snakefile").write_text(SNAKEFILE)
    (work / "pbs.yaml").write_text("queue: debug\n")
    return work


def controller(folder: Path, pbs: Pbs, *arguments: str) -> Controller:
    patience = ("--pbs-patience", "5", "--seconds-between-status-checks", "2")
    return Controller(folder, pbs.environment, *patience, *arguments)


@pytest.mark.grid
def test_quick_jobs_share_a_job_if_one_job_may_wait(folder: Path, pbs: Pbs) -> None:
    run = controller(folder, pbs, "--pbs-max-queued", "debug=1", "--keep-going")
    assert run.wait() == 1
    assert sorted(path.name for path in (folder / "out").iterdir()) == [*"012345689"]
    assert run.text.count("failed with exit status 1") == 1
    (folder / "fixed").touch()
    run = controller(folder, pbs, "--pbs-max-queued", "debug=1")
    assert run.wait() == 0, run.text
    started = {path.name: path.read_text().split() for path in folder.glob("started.*")}
    assert {name: len(ids) for name, ids in started.items()} == {
        f"started.{n}": 1 + (n == 7) for n in range(10)
    }
    # The first job may run alone, before the others are ready; then all others, and the retry.
    assert len(pbs.jobs()) <= 4
    assert not [*(folder / ".snakemake/pbs").iterdir()]


@pytest.mark.grid
def test_work_that_progresses_continues_in_new_jobs(folder: Path, pbs: Pbs) -> None:
    run = controller(folder, pbs, "--", "model")
    assert run.wait() == 1
    assert len(pbs.jobs()) == 4
    assert run.text.count("a new job continues") == 3
    words = "failed with exit status 1; saved at step 3, run Snakemake again to continue"
    assert run.text.count(words) == 1
    assert run.text.count("Error in rule train") == 1
    (folder / "enough").touch()
    assert controller(folder, pbs, "--", "model").wait() == 0


@pytest.mark.grid
def test_deleted_work_is_not_retried(folder: Path, pbs: Pbs) -> None:
    (folder / "long").touch()
    run = controller(folder, pbs, "--retries", "2", "--", "model")
    wait_for((folder / "step").exists, "the work to start")
    pbs.run("qdel", pbs.jobs()[0]["id"])
    assert run.wait() == 1
    assert "was deleted while running by root@pbs01; saved at step 1, run" in run.text
    assert len(pbs.jobs()) == 1
