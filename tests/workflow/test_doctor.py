"""The rule `doctor` runs before training if the profile asks for it, and never causes a rerun."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.pbs_servers import stand_in
from tests.support.snakemake_server import start

CLUSTERS = ("aurora", "aws-parallelcluster", "perlmutter", "polaris", "slurm", "sunspot")

SNAKEFILE = f"""
import os
from tokamake.workflow.doctor import DoctorRules
from tokamake.workflow.paths import DOCTOR
from tokamake.workflow.snakemake_internals import Snakemake
doctor_rules = DoctorRules(Snakemake(workflow))
ENVIRONMENT = "{ROOT}/workflow/envs/tokamake.yaml"
rule all:
    input: "results/a/train.json"
include: "{ROOT}/workflow/rules/doctor.smk"
rule train:
    input: doctor=doctor_rules.report_for("results/{{run}}/train.json")
    output: "results/{{run}}/train.json"
    params: speed=os.environ.get("SPEED", "")
    shell: "echo {{input}} > {{output}}"
"""

LAUNCH = """\
#!/bin/sh
[ "$1 $2 $3 $4" = "2 8 tokamake doctor" ] || [ "$1 $2" = "4 16" ] || exit 9
[ ! -e ill ] || { echo once >> tries; echo "wrong    ranks: rank 3 did not come (look)"; exit 1; }
while [ "$1" != --output ]; do shift; done
echo {} > "$2"
"""

CLUSTER = ("--set-resources", "doctor:nodes=2", "doctor:tasks=8", "doctor:runtime=10")
REPORT = "results/doctor/2-nodes-8-ranks.json"
LARGER = ("--set-resources", "doctor:nodes=4", "doctor:tasks=16", "doctor:runtime=10")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workflow with the real rule `doctor`, a stub of `train` and a stub launch script."""
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    script = tmp_path / "launch.sh"
    script.write_text(LAUNCH)
    script.chmod(0o755)
    return tmp_path


def run(
    folder: Path, *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], str]:
    launch = "launch=\"'./launch.sh'\""
    command = [
        "--cores", "1", "--show-failed-logs",
        "--default-resources", launch, "nodes=2", "tasks=8", "runtime=5", *arguments,
    ]  # fmt: skip
    process = start(command, folder, {**os.environ, **environment})
    return process, process.stdout + process.stderr


@pytest.mark.parametrize("profile", CLUSTERS)
def test_the_doctor_has_the_nodes_and_tasks_of_the_training(profile: str) -> None:
    path = ROOT / "profiles" / profile / "profile.yaml"
    rules = yaml.safe_load(path.read_text())["set-resources"]
    resources = ("nodes", "tasks", "gpus_per_node")
    assert {name: rules["doctor"].get(name) for name in resources} == {
        name: rules["train"].get(name) for name in resources
    }


@pytest.mark.slow
def test_a_failed_check_stops_the_run_before_training(folder: Path) -> None:
    (folder / "ill").touch()
    process, output = run(folder, *CLUSTER, "--retries", "2")
    assert process.returncode == 1
    assert "wrong    ranks: rank 3 did not come (look)" in output
    assert not (folder / "results/a").exists()
    assert (folder / "tries").read_text() == "once\n"
    (folder / "ill").unlink()
    process, output = run(folder, *CLUSTER)
    assert process.returncode == 0, output
    assert (folder / "results/a/train.json").read_text() == f"{REPORT}\n"


@pytest.mark.slow
def test_a_lost_report_does_not_rerun_training(folder: Path) -> None:
    run(folder, *CLUSTER)
    trained = (folder / "results/a/train.json").stat().st_mtime_ns
    for arguments in (CLUSTER, ()):  # the second is a profile without a doctor
        assert "Nothing to be done" in run(folder, *arguments)[1]
    (folder / REPORT).unlink()
    process, output = run(folder, *CLUSTER)
    assert process.returncode == 0, output
    assert (folder / "results/a/train.json").stat().st_mtime_ns == trained


@pytest.mark.grid
@pytest.mark.slow
def test_a_doctor_added_later_does_not_rerun_training(folder: Path) -> None:
    process, output = run(folder)
    assert process.returncode == 0, output
    assert (folder / "results/a/train.json").read_text() == "\n"
    assert "Nothing to be done" in run(folder, *CLUSTER)[1]
    # Another run writes a report, which is no input of this run.
    process, output = run(folder, *CLUSTER, "--", "results/b/train.json")
    assert process.returncode == 0, output
    assert (folder / REPORT).exists()
    assert "Nothing to be done" in run(folder, *CLUSTER)[1]


@pytest.mark.grid
@pytest.mark.slow
def test_a_new_report_does_not_rerun_training(folder: Path) -> None:
    run(folder, *CLUSTER)
    trained = (folder / "results/a/train.json").stat().st_mtime_ns
    process, output = run(folder, *CLUSTER, "--forcerun", "doctor")
    assert process.returncode == 0, output
    assert "rule doctor" in output
    assert (folder / "results/a/train.json").stat().st_mtime_ns == trained
    # A changed parameter of the training reruns it, without the doctor.
    process, output = run(folder, *CLUSTER, SPEED="high")
    assert process.returncode == 0, output
    assert (folder / "results/a/train.json").stat().st_mtime_ns != trained
    assert "rule doctor" not in output


@pytest.mark.grid
@pytest.mark.slow
def test_each_number_of_nodes_has_its_own_report(folder: Path) -> None:
    run(folder, *CLUSTER)
    assert "Nothing to be done" in run(folder, *LARGER)[1]
    process, output = run(folder, *LARGER, "--", "results/b/train.json")
    assert process.returncode == 0, output
    assert output.count("rule doctor:") == 1
    assert (folder / "results/b/train.json").read_text() == (
        "results/doctor/4-nodes-16-ranks.json\n"
    )
    assert (folder / REPORT).exists()
    for arguments in (CLUSTER, LARGER, ()):
        output = run(folder, *arguments, "--", "results/a/train.json", "results/b/train.json")[1]
        assert "Nothing to be done" in output


@pytest.mark.grid
@pytest.mark.slow
def test_pbs_jobs_have_the_report_as_input(folder: Path) -> None:
    server = stand_in(folder / "server")
    pbs = ("--executor", "pbs", "--jobs", "2", "--seconds-between-status-checks", "1")
    try:
        process, output = run(folder, *CLUSTER, *pbs, **server.environment)
        assert process.returncode == 0, output
        names = [job["name"].split(".")[0] for job in server.jobs()]
        assert names == ["doctor-2-nodes-8-ranks", "train-a"]
    finally:
        server.stop()
    assert (folder / "results/a/train.json").read_text() == f"{REPORT}\n"
    for arguments in (CLUSTER, ()):
        assert "Nothing to be done" in run(folder, *arguments)[1]
