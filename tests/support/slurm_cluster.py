"""A Slurm of three nodes on this machine, for tests: its own daemons, key, ports and folder."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path

from tests.support.pbs_servers import wait_for
from tokamake.runtime.process_group import free_port

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "setpriv")
MISSING = [
    name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
]
NODES = ("n1", "n2", "n3")
PATIENCE = 300
"""Seconds until a silent node is taken for dead: more than a busy machine lets one wait."""

# Nodes have more cores and memory than the machine, so that the profile asks for what it does.
_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=2
SlurmdTimeout={timeout}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 "
    "RealMemory=256000 Feature=gpu State=UNKNOWN\n"
)


@dataclass
class Slurm:
    """A running Slurm.

    Args:
        folder: of its files.
        environment: in which its commands are found.
    """

    folder: Path
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, command: str, *arguments: str) -> str:
        """Output of a command of Slurm."""
        return subprocess.run(
            [command, *arguments], env=self.environment, check=True, text=True,
            stdout=subprocess.PIPE, timeout=60,
        ).stdout  # fmt: skip

    def jobs(self, *arguments: str) -> dict[str, str]:
        """Jobs that have not ended, id to state; with `--states=all`, those that have, too."""
        lines = self.run("squeue", "--noheader", "--format=%i %T", *arguments).splitlines()
        return dict(line.split() for line in lines)

    def start(self, name: str, command: list[str]) -> None:
        """Start a daemon, which ends with this process, too, however that ends."""
        command = ["setpriv", "--pdeathsig", "TERM", *command]
        with (self.folder / f"{name}.log").open("a") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log
            )

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self.start(name, ["slurmd", "-D", "-N", name])

    def is_idle(self) -> bool:
        """Whether all nodes wait for jobs."""
        state = ["sinfo", "--noheader", "--Node", "--format=%T"]
        process = subprocess.run(state, env=self.environment, capture_output=True, text=True)
        return process.stdout.split() == ["idle"] * len(NODES)

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node, as a loss of power does; Slurm has to find out."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        _kill(_processes(self, name))

    def set_patience(self, seconds: int) -> None:
        """Change after how many seconds a silent node is taken for dead."""
        path = self.folder / "slurm.conf"
        text = re.sub(r"(?m)^SlurmdTimeout=.*$", f"SlurmdTimeout={seconds}", path.read_text())
        path.write_text(text)
        self.run("scontrol", "reconfigure")

    def stop(self) -> None:
        """End all jobs and daemons, whatever state they are in."""
        for name in NODES:
            _kill(_processes(self, name))
        for process in reversed(self.daemons.values()):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _processes(slurm: Slurm, node: str) -> list[int]:
    """Processes of the jobs on a node, and the step daemons above them."""
    variables = {f"SLURM_CONF={slurm.folder}/slurm.conf", f"SLURMD_NODENAME={node}"}
    processes = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if not variables <= set((path / "environ").read_text(errors="replace").split("\0")):
                continue
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            if Path("/proc", parent, "cmdline").read_text().startswith("slurmstepd"):
                processes.add(int(parent))
        except OSError:  # it has ended
            continue
        processes.add(int(path.name))
    return sorted(processes)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def slurm() -> Iterator[Slurm]:
    """Run a Slurm of three nodes; it is ended whatever happens.

    Raises:
        AssertionError: its nodes are not idle in time.
    """
    # The folder's path has to be short enough for a socket's name.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        folder = Path(name)
        _write_config(folder)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        running = Slurm(folder, environment)
        stack.callback(running.stop)
        key, place = folder / "key", f"{folder}/munge"
        subprocess.run(["mungekey", "--create", "--keyfile", key], env=environment, check=True)
        own = ("--socket", "--pid-file", "--log-file", "--seed-file")
        files = [f"{place}.{option[2:].partition('-')[0]}" for option in own]
        options = [part for pair in zip(own, files, strict=True) for part in pair]
        munged = ["munged", "--foreground", "--force", "--key-file", str(key), *options]
        running.start("munged", munged)
        wait_for(Path(f"{place}.socket").exists, "munged")
        running.start("slurmctld", ["slurmctld", "-D"])
        for node in NODES:
            running.start_node(node)
        wait_for(running.is_idle, "idle nodes")
        yield running


def _write_config(folder: Path) -> None:
    host = socket.gethostname().partition(".")[0]
    text = _CONFIG.format(
        host=host, port=free_port(), user=getuser(), folder=folder, timeout=PATIENCE
    )
    nodes = [_NODE.format(name=name, host=host, port=free_port()) for name in NODES]
    partition = "PartitionName=all Nodes=ALL Default=YES State=UP\n"
    (folder / "slurm.conf").write_text("".join([text, *nodes, partition]))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
