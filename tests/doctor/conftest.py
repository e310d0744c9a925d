"""A made-up cluster for the tests of `tokamake doctor`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.pbs_servers import wait_for
from tests.support.runs import MPI
from tokamake.doctor import profile, scheduler
from tokamake.doctor.profile import Profile
from tokamake.doctor.result import Result

QSTAT = {
    "timestamp": 1795255324,
    "Queue": {
        "debug": {
            "queue_type": "Execution", "enabled": "True", "started": "True",
            "resources_max": {"nodect": 2, "walltime": "01:00:00"},
        },
        "prod": {
            "queue_type": "Route", "enabled": "True", "started": "True",
            "route_destinations": "small,large",
        },
        "small": {"resources_min": {"nodect": 10}, "resources_max": {"walltime": "06:00:00"}},
        "large": {"resources_min": {"nodect": 100}, "resources_max": {"walltime": "24:00:00"}},
        "closed": {"enabled": "False", "started": "True"},
        "stopped": {"enabled": "True", "started": "False"},
    },
}  # fmt: skip

QUEUES = scheduler.pbs_queues(json.dumps(QSTAT))

SITE = """\
executor: pbs
pbs-user-file: {mine}
pbs-required: account queue
jobs: 10
default-resources: {{launch: "'site/launch.sh'", runtime: 60}}
set-resources:
  train: {{nodes: 2, tasks: 8, runtime: 60}}
"""


def states(results: list[Result]) -> dict[str, str]:
    return {result.name: result.state for result in results}


def program(folder: Path, name: str, text: str) -> None:
    """Write a fake program that logs its calls."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/{name}.calls\n{text}\n')
    path.chmod(0o755)


def read(site: Path) -> Profile:
    return profile.read_profile(site / "site", site)


def time_out(monkeypatch: pytest.MonkeyPatch, output: Path) -> None:
    """Make each program time out as soon as it has written a line to `output`."""

    def communicate(process: subprocess.Popen[str], *, timeout: float) -> None:
        wait_for(
            lambda: output.exists() and output.read_text().endswith("\n"), "the program to start"
        )
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster with PBS, a profile and a user's file."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    folder = tmp_path / "site"
    folder.mkdir()
    (tmp_path / "mine.yaml").write_text("account: proj\nqueue: debug\n")
    (folder / "profile.yaml").write_text(SITE.format(mine=tmp_path / "mine.yaml"))
    (folder / "environment.sh").write_text(f"export MPI4PY_LIBMPI={MPI}\n")
    modules = '. "$(dirname "$0")/environment.sh"'
    text = f"#!/bin/sh\n{modules}\n# no srun here\nexec mpiexec -n $2\n"
    (folder / "launch.sh").write_text(text)
    (folder / "launch.sh").chmod(0o755)
    for name in ("qsub", "qselect", "qdel"):
        program(tmp_path, name, "")
    program(tmp_path, "qstat", f"cat <<'END'\n{json.dumps(QSTAT)}\nEND")
    return tmp_path
