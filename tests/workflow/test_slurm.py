"""The workflow through profiles/slurm on a real Slurm of three nodes: stages and controllers."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.pbs_servers import wait_for
from tests.support.slurm_cluster import Slurm
from tests.support.slurm_site import DEADLINE, MARKS, Site
from tokamake import files
from tokamake.doctor.profile import Profile
from tokamake.doctor.scheduler import check_scheduler

pytestmark = MARKS

CANCELLED = 240  # seconds until a controller ends after a signal
STAGE = "results/data/batches/tokenize/{}.json"


@pytest.mark.fault("kill of the controller")
def test_signals_cancel_jobs_and_a_new_controller_adopts_jobs_of_a_killed_one(site: Site) -> None:
    target = STAGE.format("all-00000")
    waits = site.control("tokenize-all-00000", "waits")
    for count, number in enumerate((signal.SIGINT, signal.SIGTERM), 1):
        controller = site.start("--", target)
        site.await_begun("tokenize-all-00000", count)
        controller.send_signal(number)
        assert controller.wait(CANCELLED) == 1, site.text
        wait_for(lambda: not site.slurm.jobs(), "an empty queue")
        assert not (site.folder / target).exists()
        assert not list((site.folder / "results/data").rglob("*.bin"))

    # Kill the controller before sbatch answers, and again once the job id is known.
    answer = site.control("sbatch", "waits")
    controller = site.start("--", target)
    job, _ = site.await_begun("tokenize-all-00000", 3)
    wait_for((site.shim / "sbatch.stalls").exists, "sbatch to stall")
    controller.kill()
    controller.wait()
    (record,) = (site.folder / ".snakemake/slurm").glob("*/record.json")
    assert files.read_json(record, "")["job_id"] is None
    assert list(site.slurm.jobs()) == [job]
    unlock = site.start("--unlock")
    assert unlock.wait(DEADLINE) == 0, site.text
    again = f"is {job} in Slurm: found again, running"
    controller = site.start("--", target)
    wait_for(lambda: site.text.count(again) == 1, f"it\n{site.text}", DEADLINE)
    answer.unlink()
    controller.kill()
    controller.wait()
    controller = site.start("--nolock", "--", target)
    wait_for(lambda: site.text.count(again) == 2, f"it\n{site.text}", DEADLINE)
    assert list(site.slurm.jobs()) == [job]
    waits.unlink()
    assert controller.wait(DEADLINE) == 0, site.text
    assert (site.folder / target).exists()
    assert len(site.begun("tokenize-all-00000")) == 3  # the first two were cancelled
    controller = site.start("--", target)
    assert controller.wait(DEADLINE) == 0
    assert "Nothing to be done" in site.text


@pytest.mark.grid
@pytest.mark.parametrize(
    ("profile", "mine", "expected"),
    [
        ("perlmutter", "account: m1\n", "m1 all gpu"),
        ("aws-parallelcluster", "partition: all\n", "(null) all (null)"),
    ],
)
def test_a_sites_profile_runs_a_rule(site: Site, profile: str, mine: str, expected: str) -> None:
    site.profile = profile
    waits = site.control("tokenize-all-00000", "waits")
    (site.folder / f".config/tokamake/{profile}.yaml").write_text(mine)
    controller = site.start("--", STAGE.format("all-00000"))
    job, _ = site.await_begun("tokenize-all-00000", 1)
    listed = site.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%a %P %f")
    waits.unlink()
    assert listed.strip() == expected
    assert controller.wait(DEADLINE) == 0, site.text
    if profile == "perlmutter":  # its groups make one job of quick rules
        controller = site.start("--", "results/smoke/index/index.json")
        assert controller.wait(DEADLINE) == 0, site.text
        (job,) = set(re.findall(r"\(group prepare\) is (\d+) in Slurm: submitted", site.text))
        stages = [site.begun(stage) for stage in ("describe", "weigh", "index")]
        assert [jobs for ((jobs, _),) in stages] == [job] * 3


@pytest.mark.grid
def test_the_doctor_checks_slurm_and_ranks(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])
    lines = [result.line for result in check_scheduler(Profile(None, {"executor": "sbatch"}))]
    assert lines[0] == "ok       scheduler: scontrol answers, 1 queue"
    assert lines[-1].startswith("ok       limits for other rules: 1 node, time not known in all; ")
    script, printed = tmp_path / "job.sh", tmp_path / "job.log"
    python = f"{sys.executable} -m tokamake doctor --ranks"
    script.write_text(f"#!/bin/sh\nexec {ROOT}/profiles/slurm/launch.sh 2 2 {python}\n")
    command = ["sbatch", "--wait", "--nodes=2", "--ntasks=2", f"--output={printed}", str(script)]
    result = subprocess.run(
        command, cwd=tmp_path, env=cluster.environment, check=False, timeout=DEADLINE
    )
    assert result.returncode == 0, printed.read_text()
    assert printed.read_text().count("sums of the all-reduce: correct on 2 ranks, cpu\n") == 1
