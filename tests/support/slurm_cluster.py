"""Slurm with three nodes on this machine, for tests: its own daemons, key, ports and folder."""

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
from itertools import islice
from pathlib import Path

from tests.support.pbs_servers import wait_for

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "setpriv")
MISSING = [
    name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
]
NODES = ("n1", "n2", "n3")
PATIENCE = 300
"""Seconds until a silent node is down; on a busy machine, a node can be silent for long."""

# Nodes have more cores and memory than the machine, for the requests of the real profile.
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
    """A running Slurm: the folder of its files, and an environment with its commands on PATH."""

    folder: Path
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, command: str, *arguments: str) -> str:
        """Output of one of its commands."""
        return subprocess.run(
            [command, *arguments], env=self.environment, check=True, text=True,
            stdout=subprocess.PIPE, timeout=60,
        ).stdout  # fmt: skip

    def jobs(self, *arguments: str) -> dict[str, str]:
        """Id to state of jobs that have not ended; `--states=all` adds those that have."""
        lines = self.run("squeue", "--noheader", "--format=%i %T", *arguments).splitlines()
        return dict(line.split() for line in lines)

    def start(self, name: str, command: list[str]) -> None:
        """Start a daemon that ends when this process ends, even if it is killed."""
        command = ["setpriv", "--pdeathsig", "TERM", *command]
        with (self.folder / f"{name}.log").open("a") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log
            )

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self.start(name, ["slurmd", "-D", "-N", name])

    def is_idle(self) -> bool:
        """Whether all nodes are idle."""
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return result.stdout.split() == ["idle"] * len(NODES)

    def await_idle(self) -> None:
        """Wait until all nodes are idle.

        Raises:
            AssertionError: one is not in time; the message has the states and the daemons' logs.
        """
        try:
            wait_for(self.is_idle, "idle nodes")
        except AssertionError as error:
            logs = [f"{name}:\n{self._log(name)}" for name in ("slurmctld", *NODES)]
            states = self.run("scontrol", "show", "nodes"), self.run("squeue")
            raise AssertionError("\n".join([str(error), *states, *logs])) from None

    def _log(self, name: str) -> str:
        return "\n".join((self.folder / f"{name}.log").read_text().splitlines()[-20:])

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node, as a power failure does."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        _kill(_processes(self, name))

    def set_patience(self, seconds: int) -> None:
        """Set the seconds after which a silent node is down."""
        path = self.folder / "slurm.conf"
        text = re.sub(r"(?m)^SlurmdTimeout=.*$", f"SlurmdTimeout={seconds}", path.read_text())
        path.write_text(text)
        self.run("scontrol", "reconfigure")

    def stop(self) -> None:
        """Kill all jobs and stop all daemons."""
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
    """Processes of the jobs on a node, and their step daemons."""
    own_variables = {f"SLURM_CONF={slurm.folder}/slurm.conf", f"SLURMD_NODENAME={node}"}
    pids = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if not own_variables <= set((path / "environ").read_text(errors="replace").split("\0")):
                continue
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            if Path("/proc", parent, "cmdline").read_text().startswith("slurmstepd"):
                pids.add(int(parent))
        except OSError:  # the process has ended
            continue
        pids.add(int(path.name))
    return sorted(pids)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def slurm() -> Iterator[Slurm]:
    """Run a Slurm with three nodes, and stop it at the end.

    Raises:
        AssertionError: its nodes are not idle in time.
    """
    # The path must be short enough for the name of a socket.
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
        running.await_idle()
        yield running


def _own_ports(number: int) -> list[int]:
    """Free ports that no connection of another process takes while a node is down.

    Linux gives connections ports from 32768 on. Processes look from different ports on.
    """
    first = 10_000 + os.getpid() * 7 % 20_000
    ports = (port for port in range(first, 32_768) if _is_free(port))
    return list(islice(ports, number))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _write_config(folder: Path) -> None:
    host = socket.gethostname().partition(".")[0]
    port, *node_ports = _own_ports(1 + len(NODES))
    text = _CONFIG.format(host=host, port=port, user=getuser(), folder=folder, timeout=PATIENCE)
    nodes = [
        _NODE.format(name=name, host=host, port=port)
        for name, port in zip(NODES, node_ports, strict=True)
    ]
    partition = "PartitionName=all Nodes=ALL Default=YES State=UP\n"
    (folder / "slurm.conf").write_text("".join([text, *nodes, partition]))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
