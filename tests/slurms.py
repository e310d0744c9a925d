"""A Slurm of one node on this machine, for tests: its own daemons, key, ports and folder."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from getpass import getuser
from pathlib import Path

from tokamake.runtime import _free_port

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
MISSING = [
    name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
]

_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Slurm; yields the environment in which its commands find it.

    Args:
        folder: an empty one with a path short enough for a socket's name.

    Raises:
        RuntimeError: its node is not idle within a minute.
    """
    host = socket.gethostname().partition(".")[0]
    ports = {"controller_port": _free_port(), "node_port": _free_port()}
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, user=getuser(), folder=folder, **ports))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    environment = {
        **os.environ,
        "SLURM_CONF": str(config),
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
    }
    key, place = folder / "key", f"{folder}/munge"
    subprocess.run(["mungekey", "--create", "--keyfile", key], env=environment, check=True)
    own = ("--socket", "--pid-file", "--log-file", "--seed-file")
    files = [f"{place}.{name.removeprefix('--').partition('-')[0]}" for name in own]
    options = [part for pair in zip(own, files, strict=True) for part in pair]
    commands = [
        ["munged", "--foreground", "--force", "--key-file", str(key), *options],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    ]
    with ExitStack() as stack, (folder / "log").open("w") as log:
        for command in commands:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        _await_idle(environment, folder / "log")
        yield environment


def _await_idle(environment: dict[str, str], log: Path) -> None:
    deadline = time.monotonic() + 60
    state = ["sinfo", "--noheader", "--format", "%T"]
    while time.monotonic() < deadline:
        found = subprocess.run(state, env=environment, capture_output=True, text=True, check=False)
        if found.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise RuntimeError(f"no idle node: {found.stdout}{found.stderr}{log.read_text()[-3000:]}")
