"""Training under a real Slurm, whose srun starts the ranks as profiles/slurm has it."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import launch, losses, make_run, prepare, summary
from slurms import MISSING, slurm

from tokamake.doctor.profile import Profile
from tokamake.doctor.scheduler import check_scheduler

ROOT = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.ranks,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands find a cluster."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(Path(folder)) as found:
        yield found


def test_srun_starts_the_same_run_as_torchrun(cluster: dict[str, str], tmp_path: Path) -> None:
    root = prepare(tmp_path)
    found, expected = (make_run(root, name, zero_stage=2) for name in ("srun", "torchrun"))
    program = f"{sys.executable} -m tokamake train --config {found}"
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/sh\nexport OMP_NUM_THREADS=1\nexec {ROOT}/profiles/slurm/launch.sh 1 2 {program}\n"
    )
    printed = tmp_path / "job.log"
    command = ["sbatch", "--wait", "--ntasks", "2", "--output", str(printed), str(script)]
    subprocess.run(command, env=cluster, check=False, timeout=300)
    text = printed.read_text()
    assert text.count("layout    2 ranks = data 2 on cpu, fp32, native, ZeRO stage 2") == 1, text
    launch(expected, ranks=2)
    assert summary(found)["world_size"] == 2
    for key in ("loss", "grad_norm", "validation_loss"):
        assert losses(found, key) == losses(expected, key)


def test_the_doctor_asks_slurm_and_its_ranks(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster[name])
    told = [one.line for one in check_scheduler(Profile(None, {"executor": "slurm"}))]
    assert told[0] == "ok       scheduler: scontrol answers, 1 queue"
    assert told[-1].startswith("ok       limits for other rules: 1 node, time not known in all; ")
    launch_script = ROOT / "profiles/slurm/launch.sh"
    command = [launch_script, "1", "2", sys.executable, "-m", "tokamake", "doctor", "--ranks"]
    result = subprocess.run(
        command, cwd=tmp_path, env=cluster, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("sums of the all-reduce: right on 2 ranks, cpu\n") == 1
