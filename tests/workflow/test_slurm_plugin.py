"""profiles/slurm-plugin on a real Slurm: the workflow through snakemake-executor-plugin-slurm."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.runs import losses
from tests.support.slurm_site import DEADLINE, MARKS, Site

pytestmark = MARKS

PLUGIN = Path(sys.prefix) / "slurm-plugin"
"""Folder of the plug-in, which `make install` keeps out of the way of other tests."""
RESOURCES = (
    "train:nodes=2", "train:tasks=2", "train:mpi=srun", "train:runtime=10",
    "train:slurm_extra='--signal=TERM@120'", "evaluate:tasks=2", "evaluate:mpi=srun",
)  # fmt: skip


@pytest.mark.grid
def test_a_run_from_text_to_scores_stops_and_continues(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on two nodes gets the signal before its time limit, saves, and is retried."""
    site.profile = "slurm-plugin"
    site.options = ("--slurm-init-seconds-before-status-checks", "1")
    site.variables = {"PYTHONPATH": str(PLUGIN)}
    site.snakemake = [site.shim / "bin/python", "-m", "snakemake"]
    _keep_configuration(site)
    config = yaml.safe_load((site.folder / "my.yaml").read_text())
    config["train"] |= {"train_steps": 6, "segment_steps": None}
    (site.folder / "my.yaml").write_text(yaml.safe_dump(config))
    site.control("2", "hangs")
    launch = "launch='profiles/slurm-plugin/launch.sh'"
    values = (launch, "slurm_account='mine'", "slurm_partition='all'")
    controller = site.start(
        "--default-resources", *values, "mem_mb=1000", "runtime=10", "disk_mb=1000",
        "--set-resources", *RESOURCES, "--", "results/smoke/evaluate.json",
    )  # fmt: skip
    job = site.await_hang(2)
    listed = site.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%D %a %P")
    assert listed == "2 mine all\n"
    site.slurm.run("scontrol", "update", f"JobId={job}", "EndTime=now+135")
    site.await_begun("train", 4)
    assert controller.wait(DEADLINE) == 0, site.text
    assert (site.folder / "results/smoke/evaluate.json").exists()
    monkeypatch.chdir(site.folder)
    assert len(losses(site.folder / "results/smoke/run.yaml")) == 6
    assert re.search(r"continuing at step \d", site.log()), site.text
    jobs = [job for job, _ in site.begun("train")]
    assert len(set(jobs)) == 2
    assert len({node for _, node in site.begun("train")[:2]}) == 2


def _keep_configuration(site: Site) -> None:
    """Let commands in jobs find this Slurm: the plug-in removes SLURM_CONF from their variables."""
    for name in ("srun", "scontrol"):
        path = site.shim / "commands" / name
        configuration = site.slurm.environment["SLURM_CONF"]
        command = f'SLURM_CONF={configuration} exec {shutil.which(name)} "$@"'
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
