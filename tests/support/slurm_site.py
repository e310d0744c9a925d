"""A user's folder on a real Slurm of three nodes; a test can let its stages fail, wait or hang."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.pbs_servers import wait_for
from tests.support.programs import JOB_PYTHON, torch_python, write_job_python
from tests.support.programs import programs as warm
from tests.support.slurm_cluster import MISSING, Slurm

MARKS = [
    pytest.mark.slurm,
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"
    ),
]
"""Marks of tests on a real Slurm."""
DEADLINE = 900
"""Seconds for a step of the workflow on a busy machine."""

# Replaces tokamake: records the job of each stage, and lets a stage fail or wait if the test has
# written a file for it. Training can hang, as on a node that hangs.
SHIM = """\
#!/bin/bash
stage=$1
[ "$stage" = tokenize-batch ] && stage=tokenize-$5
echo "$SLURM_JOB_ID $SLURMD_NODENAME" >> "$SHIM/$stage.begun"
if rm "$SHIM/$stage.fails" 2>/dev/null; then echo failed on purpose >&2; exit 1; fi
while [ -e "$SHIM/$stage.waits" ]; do sleep 0.05; done
[ "$stage" = train ] && exec {python} "$SHIM/train.py" "$@"
exec {tokamake} "$@"
"""

# Training hangs after the checkpoint of a step with a file STEP.hangs, until the file is removed or
# a signal arrives; with STEP.deaf, only SIGKILL ends it.
TRAIN = """\
import os
import time
from pathlib import Path

from tokamake.cli import main
from tokamake.train.checkpoints import saving
from tokamake.train.stopping.stopping import StopRequest

commit, note, shim = saving.commit, StopRequest.note, Path(os.environ["SHIM"])
asked = []


def commit_and_hang(output, state):
    folder = commit(output, state)
    deaf = (shim / f"{state.step}.deaf").exists()
    while (shim / f"{state.step}.hangs").exists() and (deaf or not asked):
        (shim / f"{state.step}.hung").touch()
        time.sleep(0.05)
    return folder


def note_and_go_on(*arguments):
    note(*arguments)
    asked.append(True)


saving.commit, StopRequest.note = commit_and_hang, note_and_go_on
main()
"""

# Replaces sbatch: submits, then delays its answer while the file sbatch.waits exists.
SBATCH = """\
#!/bin/bash
answer=$({sbatch} "$@") || exit
while [ -e "$SHIM/sbatch.waits" ]; do : > "$SHIM/sbatch.stalls"; sleep 0.05; done
echo "$answer"
"""


@dataclass
class Site:
    """A user's folder on a cluster; `shim` has the files by which the test controls stages."""

    folder: Path
    shim: Path
    slurm: Slurm
    profile: str = "slurm"
    options: tuple[str, ...] = ("--sbatch-patience", "10")
    variables: dict[str, str] = field(default_factory=dict)
    controllers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    snakemake: list[str | Path] = field(default_factory=lambda: [warm("snakemake") / "snakemake"])
    """Command of Snakemake; by default, it and its jobs are forks of a server."""

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start Snakemake."""
        path = f"{self.shim}/commands:{self.slurm.environment['PATH']}"
        environment = {
            **self.slurm.environment, "PATH": path, "SHIM": str(self.shim),
            "HOME": str(self.folder), "OMP_NUM_THREADS": "1",
            JOB_PYTHON: str(self.shim / "bin/job-python"), **self.variables,
        }  # fmt: skip
        with (self.folder / "controller.log").open("a") as log:
            process = subprocess.Popen(
                [
                    *self.snakemake,
                    "--profile", f"profiles/{self.profile}",
                    "--configfile", "my.yaml", "--seconds-between-status-checks", "1",
                    "--latency-wait", "10", *self.options,
                    "--set-threads", "tokenize=1", "train=1", *arguments,
                ],
                cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.controllers.append(process)
        return process

    def control(self, stage: str, action: str) -> Path:
        """Let a stage fail once, wait or hang."""
        path = self.shim / f"{stage}.{action}"
        path.touch()
        return path

    def begun(self, stage: str) -> list[tuple[str, ...]]:
        """Jobs in which a stage began, with their nodes."""
        path = self.shim / f"{stage}.begun"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(line.split()) for line in lines]

    def await_begun(self, stage: str, times: int) -> tuple[str, ...]:
        """Wait until a stage has begun `times` times; return its last job and node."""
        wait_for(lambda: len(self.begun(stage)) >= times, f"{stage}\n{self.text}", DEADLINE)
        return self.begun(stage)[-1]

    def await_hang(self, step: int) -> str:
        """Wait until training hangs after the checkpoint of a step; return its job."""
        hung = self.shim / f"{step}.hung"
        ended = self.controllers[-1].poll
        wait_for(lambda: hung.exists() or ended() is not None, f"{hung}\n{self.text}", DEADLINE)
        assert ended() is None, self.text
        return self.begun("train")[-1][0]

    def stopped(self, why: str) -> int:
        """Step at which training stopped, from the log of a job."""
        texts = [path.read_text() for path in self.folder.glob(".snakemake/slurm/*/*.log")]
        text = "\n".join([self.text, *texts])
        match = re.search(
            rf"^stopped {why}: saved at step (\d+), (?:the next job|run the same)", text, re.M
        )
        assert match, text
        return int(match[1])

    def log(self, segment: str = "") -> str:
        """Output of a training job."""
        return (self.folder / f"logs/smoke/train{segment}.log").read_text()

    @property
    def text(self) -> str:
        """Output of Snakemake so far."""
        return (self.folder / "controller.log").read_text()


def make_shim(folder: Path) -> Path:
    """Copy this Python environment, with the shim as its `tokamake`."""
    programs, own = folder / "bin", Path(sys.prefix)
    programs.mkdir(parents=True)
    (folder / "lib").symlink_to(own / "lib")
    shutil.copy(own / "pyvenv.cfg", folder)
    (programs / "python").symlink_to(sys.executable)
    write_job_python(programs)
    (folder / "commands").mkdir()
    (folder / "train.py").write_text(TRAIN)
    tokamake = str(warm("tokamake") / "tokamake")
    real = {"tokamake": tokamake, "python": torch_python(), "sbatch": _sbatch()}
    for path, text in ((programs / "tokamake", SHIM), (folder / "commands/sbatch", SBATCH)):
        for name, command in real.items():
            text = text.replace(f"{{{name}}}", command)
        path.write_text(text)
        path.chmod(0o755)
    return folder


def _sbatch() -> str:
    return str(shutil.which("sbatch"))
