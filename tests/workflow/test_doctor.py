"""The rule `doctor`: before the first training where a profile says so, and never in its way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.pbs_servers import stand_in
from tests.support.workflows import CONFIG, MINE, jobs, make_workspace, snakemake

CLUSTERS = ("aurora", "aws-parallelcluster", "perlmutter", "polaris", "slurm", "sunspot")

SNAKEFILE = f"""
import os
from tokamake.workflow.doctor import DoctorRules
from tokamake.workflow.paths import DOCTOR
from tokamake.workflow.snakemake_internals import Snakemake
doctor_rules = DoctorRules(Snakemake(workflow))
rule all:
    input: "results/a/train.json"
include: "{ROOT}/workflow/rules/doctor.smk"
rule train:
    input: doctor=ancient(doctor_rules.report_for("results/{{run}}/train.json"))
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
    """A workflow that trains after the real rule, with a launch script that makes a report."""
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
        sys.executable, "-m", "snakemake", "--cores", "1", "--show-failed-logs",
        "--default-resources", launch, "nodes=2", "tasks=8", "runtime=5", *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done, done.stdout + done.stderr


@pytest.mark.parametrize("profile", ["local", *CLUSTERS])
def test_clusters_see_a_doctor_first_and_this_machine_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    folder = make_workspace(tmp_path)
    train = {**CONFIG["train"], "global_batch_size": 48, "micro_batch_size": 1}
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "train": train}))
    values = yaml.safe_load((ROOT / "profiles" / profile / "profile.yaml").read_text())
    required = values.get(f"{values.get('executor')}-required", "").split()
    mine = tmp_path / f".config/tokamake/{profile}.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(yaml.safe_dump(dict.fromkeys(required, "mine")))
    monkeypatch.setenv("HOME", str(tmp_path))
    planned = jobs(snakemake(folder, "-n", "--profile", f"profiles/{profile}", *MINE, "train"))
    assert planned["train"] == 1
    assert planned.get("doctor", 0) == (profile != "local")


@pytest.mark.parametrize("profile", CLUSTERS)
def test_the_doctor_sees_the_ranks_of_the_training(profile: str) -> None:
    path = ROOT / "profiles" / profile / "profile.yaml"
    rules = yaml.safe_load(path.read_text())["set-resources"]
    asked = ("nodes", "tasks", "gpus_per_node")
    assert {name: rules["doctor"].get(name) for name in asked} == {
        name: rules["train"].get(name) for name in asked
    }


@pytest.mark.slow
def test_an_ill_cluster_stops_the_run_before_training(folder: Path) -> None:
    (folder / "ill").touch()
    done, told = run(folder, *CLUSTER, "--retries", "2")
    assert done.returncode == 1
    assert "wrong    ranks: rank 3 did not come (look)" in told
    assert not (folder / "results/a").exists()
    assert (folder / "tries").read_text() == "once\n"
    (folder / "ill").unlink()
    done, told = run(folder, *CLUSTER)
    assert done.returncode == 0, told
    assert (folder / "results/a/train.json").read_text() == f"{REPORT}\n"


@pytest.mark.slow
def test_what_was_trained_after_the_doctor_stays(folder: Path) -> None:
    run(folder, *CLUSTER)
    trained = (folder / "results/a/train.json").stat().st_mtime_ns
    for arguments in (CLUSTER, ()):  # the second is a profile without a doctor
        assert "Nothing to be done" in run(folder, *arguments)[1]
    (folder / REPORT).unlink()
    done, told = run(folder, *CLUSTER)
    assert done.returncode == 0, told
    assert (folder / "results/a/train.json").stat().st_mtime_ns == trained


@pytest.mark.slow
def test_what_was_trained_without_the_doctor_stays(folder: Path) -> None:
    done, told = run(folder)
    assert done.returncode == 0, told
    assert (folder / "results/a/train.json").read_text() == "\n"
    assert "Nothing to be done" in run(folder, *CLUSTER)[1]
    # Another run on the cluster brings a report, which is none of this one's inputs.
    done, told = run(folder, *CLUSTER, "--", "results/b/train.json")
    assert done.returncode == 0, told
    assert (folder / REPORT).exists()
    assert "Nothing to be done" in run(folder, *CLUSTER)[1]


@pytest.mark.slow
def test_a_new_doctor_does_not_train_again(folder: Path) -> None:
    run(folder, *CLUSTER)
    trained = (folder / "results/a/train.json").stat().st_mtime_ns
    done, told = run(folder, *CLUSTER, "--forcerun", "doctor")
    assert done.returncode == 0, told
    assert "rule doctor" in told
    assert (folder / "results/a/train.json").stat().st_mtime_ns == trained
    # What changes the training does; the doctor has nothing to add then.
    done, told = run(folder, *CLUSTER, SPEED="high")
    assert done.returncode == 0, told
    assert (folder / "results/a/train.json").stat().st_mtime_ns != trained
    assert "rule doctor" not in told


@pytest.mark.grid
@pytest.mark.slow
def test_the_doctor_sees_each_number_of_nodes_and_trains_nothing_again(folder: Path) -> None:
    run(folder, *CLUSTER)
    assert "Nothing to be done" in run(folder, *LARGER)[1]
    done, told = run(folder, *LARGER, "--", "results/b/train.json")
    assert done.returncode == 0, told
    assert told.count("rule doctor:") == 1
    assert (folder / "results/b/train.json").read_text() == (
        "results/doctor/4-nodes-16-ranks.json\n"
    )
    assert (folder / REPORT).exists()
    for arguments in (CLUSTER, LARGER, ()):
        told = run(folder, *arguments, "--", "results/a/train.json", "results/b/train.json")[1]
        assert "Nothing to be done" in told


@pytest.mark.grid
@pytest.mark.slow
def test_jobs_elsewhere_have_the_inputs_that_their_controller_saw_to(folder: Path) -> None:
    server = stand_in(folder / "server")
    pbs = ("--executor", "pbs", "--jobs", "2", "--seconds-between-status-checks", "1")
    try:
        done, told = run(folder, *CLUSTER, *pbs, **server.environment)
        assert done.returncode == 0, told
        names = [job["name"].split(".")[0] for job in server.jobs()]
        assert names == ["doctor-2-nodes-8-ranks", "train-a"]
    finally:
        server.stop()
    assert (folder / "results/a/train.json").read_text() == f"{REPORT}\n"
    for arguments in (CLUSTER, ()):
        assert "Nothing to be done" in run(folder, *arguments)[1]
