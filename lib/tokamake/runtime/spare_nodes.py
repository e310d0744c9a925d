"""Spare nodes of a job: they replace nodes that are lost, so that ranks restart in the same job.

A job may have more nodes than its ranks need. Ranks run on the first ones. After a failure, each
host of the job is asked to run `true` through the launch script of the ranks; hosts that do not
answer are left out. The chosen hosts are in the file that the environment variable
TOKAMAKE_HOSTFILE names, one a line; launch scripts start the ranks on these.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tokamake.errors import note_faulty_hosts
from tokamake.runtime.console import shortened
from tokamake.scheduler_formats import hosts_of

HOSTFILE_VARIABLE = "TOKAMAKE_HOSTFILE"
"""Environment variable with the file of the hosts on which a launch script starts ranks."""
_ANSWER_SECONDS = 60.0
_END_SECONDS = 5.0
"""Time for a launcher to end after a signal."""


class SpareNodes:
    """Hosts of a job that has more than its ranks need, and the hosts that the ranks use."""

    def __init__(
        self,
        launch: str,
        num_nodes: int,
        *,
        hosts: Sequence[str],
        folder: Path,
        seconds: float = _ANSWER_SECONDS,
    ) -> None:
        self._launch, self._num_nodes, self._seconds = launch, num_nodes, seconds
        self._hosts, self._folder = list(hosts), folder
        self.used = self._hosts[:num_nodes]
        """Hosts on which ranks run, in the order of the job."""
        self.variables = self._variables("ranks", self.used)
        """Environment variables for the launch script of the ranks."""

    def replace_lost(self) -> bool:
        """Check all hosts after a failure; choose the next start's, or return False if too few.

        Hosts that ranks used before are preferred. Prints a line if hosts are lost.
        """
        whole = self._whole_hosts()
        lost = [host for host in self._hosts if host not in whole]
        preferred = sorted(whole, key=lambda host: host not in self.used)[: self._num_nodes]
        # The first host of ranks must be the first one in the order of the job.
        self.used = [host for host in self._hosts if host in preferred]
        # The launcher of a lost node may still hold the resources of its ranks on whole nodes.
        self.variables = {**self._variables("ranks", self.used), "SLURM_OVERLAP": "1"}
        is_enough = len(self.used) == self._num_nodes
        if lost:
            note_faulty_hosts(lost)
            end = f"continues on {shortened(self.used)}" if is_enough else self._too_few()
            verb = "does" if len(lost) == 1 else "do"
            print(
                f"tokamake: {shortened(lost)} {verb} not answer; {end}", file=sys.stderr, flush=True
            )
        return is_enough

    def _too_few(self) -> str:
        left = f"{len(self.used)} of {len(self._hosts)} nodes left, ranks need {self._num_nodes}"
        return f"{left}: no restart in this job"

    def _whole_hosts(self) -> list[str]:
        """Hosts on which `true` runs; all are asked at the same time."""
        asked = {host: self._ask(place, host) for place, host in enumerate(self._hosts)}
        _wait(asked.values(), self._seconds)
        whole = [host for host, process in asked.items() if process.poll() == 0]
        _end(asked.values())
        return whole

    def _ask(self, place: int, host: str) -> "subprocess.Popen[bytes]":
        variables = {**self._variables(str(place), [host]), "SLURM_OVERLAP": "1"}
        return subprocess.Popen(
            [self._launch, "1", "1", "true"],
            env={**os.environ, **variables}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _variables(self, name: str, hosts: Sequence[str]) -> dict[str, str]:
        path = self._folder / name
        path.write_text("".join(f"{host}\n" for host in hosts))
        return {HOSTFILE_VARIABLE: str(path)}


def find_spare_nodes(
    command: Sequence[str], environment: Mapping[str, str], *, folder: Path
) -> SpareNodes | None:
    """Spare nodes of a job (command: launch script, numbers, rank command), or None."""
    hosts = hosts_of_job(environment)
    if len(command) < 4 or not command[1].isdecimal() or len(hosts) <= int(command[1]):
        return None
    return SpareNodes(command[0], int(command[1]), hosts=hosts, folder=folder)


def hosts_of_job(environment: Mapping[str, str]) -> list[str]:
    """Hosts of the PBS or Slurm job that has these variables; empty outside of a job."""
    if path := environment.get("PBS_NODEFILE"):
        with suppress(OSError):
            # A host has a line for each of its chunks or MPI processes.
            return list(dict.fromkeys(Path(path).read_text().split()))
    return hosts_of(environment.get("SLURM_JOB_NODELIST", ""))


def _wait(processes: Iterable["subprocess.Popen[bytes]"], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _end(processes: Iterable["subprocess.Popen[bytes]"]) -> None:
    """End launchers that wait for a host, and all that they started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        waiting = [process for process in processes if process.poll() is None]
        for process in waiting:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        _wait(waiting, _END_SECONDS)
