"""A PBS for tests: the stand-in (pbs_standin.py), or the PBS of this machine."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.programs import programs

STAND_IN = Path(__file__).with_name("pbs_standin.py")
FRONT = Path(__file__).with_name("pbs_front.py")
COMMANDS = ("qsub", "qstat", "qselect", "qdel", "qrls")
REAL = shutil.which("qsub")
OWN_FILE = Path("~/.config/snakemake/pbs.yaml")
"""User file with the values for the PBS of this machine."""
DEADLINE = 180.0
REAL_DEADLINE = 600.0
"""Seconds for a real PBS, which schedules and kills jobs more slowly."""


@dataclass
class Pbs:
    """A stand-in server: the folder of its jobs, and an environment with its commands on PATH."""

    folder: Path
    environment: dict[str, str]
    values: str = "queue: prod\naccount: proj\n"
    """Text of a user file whose values it accepts."""
    patience: int = 5
    """Seconds between a job's exit-status file and the server's report of its end, at most."""

    def faults(self, command: str, *names: str) -> None:
        """Set the faults of the next calls of a command, one per call; `NAME*` is for all calls."""
        part = self.folder / f"{command}.part"
        part.write_text(" ".join(names))
        part.replace(self.folder / f"{command}.faults")

    def set(self, **settings: Any) -> None:
        """Set options of the server: slots, purged, first, ending_seconds, history."""
        (self.folder / "settings.json").write_text(json.dumps(settings))

    def calls(self, command: str) -> list[tuple[float, list[str]]]:
        """Time and arguments of each call of a command."""
        path = self.folder / "calls"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
        return [(line[0], line[2:]) for line in lines if line[1] == command]

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, including those that have ended."""
        paths = sorted((self.folder / "jobs").glob("*.json"), key=lambda path: int(path.stem))
        jobs = [json.loads(path.read_text()) for path in paths]
        return [{**job, "id": f"{job['number']}.pbs01"} for job in jobs]

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of its commands."""
        return subprocess.run(
            [command, *arguments], env=self.environment, capture_output=True, text=True, check=False
        )

    def stop(self) -> None:
        """Delete all jobs and wait for their end."""
        (self.folder / "stopped").touch()
        for job in self.jobs():
            if job["state"] != "F":
                self.run("qdel", job["id"])
        wait_for(lambda: all(job["state"] == "F" for job in self.jobs()), "jobs to end")


@dataclass
class RealPbs(Pbs):
    """The PBS of this machine, with the real commands in `programs`, behind `pbs_front.py`."""

    programs: Path = Path("/usr/bin")
    patience: int = 60
    """A killed job can end 25 s after it has written its exit status."""

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs of the test."""
        ids = [path.name for path in (self.folder / "jobs").iterdir()]
        if not ids:  # qstat without ids lists the jobs of all users
            return []
        command = [str(self.programs / "qstat"), "-E", "-x", "-f", "-F", "json", *ids]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = {"state": "job_state", "account": "Account_Name", "name": "Job_Name"}
        return [
            {
                "id": job_id, "number": int(job_id.partition(".")[0]),
                "substate": job["substate"], "queue": job["queue"],
                **{name: job.get(key) for name, key in names.items()},
            }
            for job_id, job in json.loads(output, strict=False).get("Jobs", {}).items()
        ]  # fmt: skip


def stand_in(folder: Path) -> Pbs:
    """Set up a stand-in in an empty folder."""
    return Pbs(folder, _commands(folder, STAND_IN, COMMANDS))


def real(folder: Path, programs: Path) -> Pbs:
    """Set up a front of a real server in an empty folder; `programs` has the server's commands."""
    environment = _commands(folder, FRONT, COMMANDS, str(programs))
    own = OWN_FILE.expanduser()
    values = own.read_text() if own.exists() else ""
    return RealPbs(folder, environment, values, programs=programs)


def _commands(folder: Path, script: Path, names: Iterable[str], *more: str) -> dict[str, str]:
    """Write commands that run a script; return an environment with them on PATH."""
    (folder / "bin").mkdir(parents=True)
    (folder / "jobs").mkdir()
    for command in names:
        path, words = folder / "bin" / command, [sys.executable, "-IS", str(script), command]
        path.write_text(f'#!/bin/sh\nexec {shlex.join([*words, str(folder), *more])} "$@"\n')
        path.chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path}


def wait_for(condition: Callable[[], object], event: str, seconds: float | None = None) -> None:
    """Wait until a condition holds, for at most `seconds` or `DEADLINE`.

    Raises:
        AssertionError: the condition does not hold in time.
    """
    seconds = DEADLINE if seconds is None else seconds
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {event}"
        time.sleep(0.02)


class Controller:
    """Snakemake that runs a workflow on a PBS, in the background, in a folder with a Snakefile."""

    def __init__(self, folder: Path, environment: dict[str, str], *arguments: str) -> None:
        self.log = folder / f"controller-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    programs("snakemake") / "snakemake", "--executor", "pbs", "--jobs", "20",
                    "--scheduler", "greedy", "--seconds-between-status-checks", "1",
                    "--latency-wait", "10", "--default-resources", "runtime=5",
                    "--pbs-user-file", str(folder / "pbs.yaml"), *arguments,
                ],
                cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the Snakemake process alone."""
        self.process.send_signal(number)

    def wait(self, seconds: float | None = None) -> int:
        """Wait for its end, for at most `seconds` or `DEADLINE`; return its exit status."""
        return self.process.wait(DEADLINE if seconds is None else seconds)

    @property
    def text(self) -> str:
        """Output so far."""
        return self.log.read_text()
