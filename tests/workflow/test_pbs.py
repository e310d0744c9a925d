"""The whole workflow through profiles/aurora: real jobs and ranks, stand-ins of PBS and PALS."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT, SUPPORT
from tests.support.pbs_servers import stand_in
from tests.support.programs import programs as warm
from tests.support.programs import write_job_python
from tests.support.runs import MPICH, launch, losses, make_run, prepare
from tests.support.workflows import CONFIG, CORPORA, MINE, jobs, make_workspace, snakemake
from tokamake import files
from tokamake.config.resolved_run import read_run

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PALS = SUPPORT / "pals_standin.py"
RANKS = ("nodes=2", "tasks=2", "runtime=10")
LOCAL = ("--set-resources", "train:tasks=2", "--set-threads", "tokenize=1", "train=2")
AURORA = (
    "--seconds-between-status-checks", "1", "--latency-wait", "10", "--set-threads", "tokenize=1",
    "--set-resources", *(f"{rule}:{value}" for rule in ("train", "doctor") for value in RANKS),
)  # fmt: skip


# A server runs what no launcher started.
TOKAMAKE = """\
#!/bin/sh
[ -n "$PMI_RANK" ] || exec {warm} "$@"
exec {own} "$@"
"""


def make_environment(folder: Path) -> Path:
    """Copy this Python environment, with a failing mpiexec; return its Python."""
    programs, own = folder / "bin", Path(sys.prefix)
    programs.mkdir(parents=True)
    (folder / "lib").symlink_to(own / "lib")
    shutil.copy(own / "pyvenv.cfg", folder)
    (programs / "python").symlink_to(sys.executable)
    text = TOKAMAKE.format(own=own / "bin/tokamake", warm=warm("tokamake") / "tokamake")
    (programs / "tokamake").write_text(text)
    (programs / "tokamake").chmod(0o755)
    (programs / "mpiexec").symlink_to("/bin/false")
    return write_job_python(programs)


def make_site(folder: Path, profiles: Path, calls: Path) -> None:
    """Write a site with PALS's mpiexec, which the profiles of a workspace load."""
    (folder / "bin").mkdir(parents=True)
    command = shlex.join([sys.executable, "-IS", str(PALS), str(MPICH), str(calls)])
    (folder / "bin/mpiexec").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (folder / "bin/mpiexec").chmod(0o755)
    profiles.unlink()
    shutil.copytree(ROOT / "profiles", profiles)
    (profiles / "aurora/environment.sh").write_text(f"PATH=$PATH:{folder}/bin\n")


def hashes(folder: Path) -> dict[str, str]:
    """Hash of each file that must not depend on the machine."""
    results = folder / "results"
    kinds = (
        "data/**/*.bin", "data/**/*.idx", "data/metadata.json", "data/*.txt", "smoke/index/*.npy",
        "smoke/export/*.safetensors", "smoke/samples.json", "smoke/evaluate.json",
    )  # fmt: skip
    return {
        str(path.relative_to(results)): files.sha256(path)
        for kind in kinds
        for path in sorted(results.glob(kind))
    }


def make_folder(folder: Path, segment_steps: int | None = None) -> Path:
    """A workspace whose run is as long as its epochs: some ten steps."""
    folder.mkdir()
    make_workspace(folder)
    train = {**CONFIG["train"], "train_steps": None, "evaluation_interval": 8}
    config = {**CONFIG, "train": {**train, "segment_steps": segment_steps}}
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    table = re.sub(r"\t\d$", "\t0.05", CORPORA.replace("weight", "epochs"), flags=re.MULTILINE)
    (folder / "corpora.tsv").write_text(table)
    mine = folder / ".config/tokamake/aurora.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("account: proj\nqueue: debug\nfilesystems: home:flare\n")
    return folder


@pytest.mark.grid
def test_segments_on_two_pbs_nodes_give_the_same_bytes_as_a_local_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = make_folder(tmp_path / "here"), make_folder(tmp_path / "there", segment_steps=6)
    local = snakemake(here, *LOCAL, *MINE, "all")
    assert local.returncode == 0, local.stdout + local.stderr
    aurora = ("--profile", "profiles/aurora", *AURORA, *MINE, "all")
    monkeypatch.setenv("HOME", str(there))  # for the user file
    planned = jobs(snakemake(there, "-n", *aurora))

    server = stand_in(tmp_path / "server")
    python = make_environment(tmp_path / "environment")
    make_site(tmp_path / "site", there / "profiles", server.folder)
    try:
        run = subprocess.run(
            [python, "-m", "snakemake", *aurora], cwd=there, timeout=1800, capture_output=True,
            text=True, env=server.environment, check=False,
        )  # fmt: skip
        submitted = {job["name"].rpartition(".")[0]: job["asked"] for job in server.jobs()}
    finally:
        server.stop()
    assert run.returncode == 0, run.stdout + run.stderr
    assert hashes(there) == hashes(here)
    assert {Path(name).name for name in hashes(here)} >= {"model.safetensors", "evaluate.json"}

    # Groups make two jobs of six quick rules. The controller
    # plans the segments once the data exist.
    batches = {name for name in submitted if name.startswith(("tokenize", "merge"))}
    doctor, train, segment = "doctor-aurora-2-nodes-2-ranks", "train-smoke", "train-smoke-.6"
    assert submitted.keys() - batches == {
        doctor, "text", "prepare", train, segment, "export_hf-smoke", "evaluate-smoke",
        "evaluate-smoke-.6", "generate-smoke", "report",
    }  # fmt: skip
    # A dry run before the data exist knows one job of the chain.
    assert planned["plan_segments"] == planned["train"] == 1
    # One job may wait in the queue debug, so batches that are ready share jobs.
    assert len(batches) <= planned["tokenize"] + planned["merge"]
    several = {name for name, asked in submitted.items() if asked["select"] != "1"}
    assert several == {doctor, train, segment}
    assert submitted[train]["select"] == "2"
    calls = [json.loads(line) for line in (server.folder / "mpiexec.calls").open()]
    launched = [(call["command"][1], call["np"], call["ppn"]) for call in calls]
    assert sorted(launched) == [
        ("doctor", 2, 1), ("evaluate", 1, 1), ("evaluate", 1, 1), ("generate", 1, 1),
        ("train", 2, 1), ("train", 2, 1),
    ]  # fmt: skip


# Rank 1 dies in a step, and its host with it.
DYING = """
import os, sys
from pathlib import Path
from tests.support.forked import killed_in_backward
from tokamake.cli import main
lost = Path(sys.argv.pop(1))
if os.environ["PALS_RANKID"] == "1" and not lost.read_text():
    lost.write_text("n2\\n")
    killed_in_backward()
main()
"""
# PALS's mpiexec fails if it does not reach a host of the host file.
REACHES = """\
#!/bin/sh
for option; do
    case $option in --hostfile=*) ! grep -qxf LOST "${option#*=}" || exit 1 ;; esac
done
"""


@pytest.mark.grid
@pytest.mark.fault("lost node")
def test_ranks_continue_on_a_spare_node_if_pals_no_longer_reaches_one(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    root, lost = prepare(tmp_path / "root"), tmp_path / "lost"
    config, undisturbed = make_run(root, "run"), make_run(root, "undisturbed")
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    make_site(tmp_path / "site", tmp_path / "profiles", tmp_path)
    mpiexec = tmp_path / "site/bin/mpiexec"
    text = mpiexec.read_text().removeprefix("#!/bin/sh\n")
    mpiexec.write_text(REACHES.replace("LOST", str(lost)) + text)
    lost.touch()
    (tmp_path / "nodes").write_text("n1\nn2\nn3\n")
    programs = make_environment(tmp_path / "environment").parent
    train = [sys.executable, "-c", DYING, str(lost), "train", "--config", str(config)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tokamake.runtime.restarts", "1", str(read_run(config).output)),
            *(str(tmp_path / "profiles/aurora/launch.sh"), "2", "2", *train),
        ],
        env={
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}",
            "PBS_NODEFILE": str(tmp_path / "nodes"),
        },
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokamake: n2 does not answer; continues on n1, n3\n" in done.stderr
    calls = [json.loads(line) for line in (tmp_path / "mpiexec.calls").open()]
    assert [call["np"] for call in calls if call["command"] != ["true"]] == [2, 2]
    launch(undisturbed, ranks=2)
    assert losses(config) == losses(undisturbed)
