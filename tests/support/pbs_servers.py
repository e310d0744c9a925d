"""A PBS for tests: the stand-in (pbs_standin.py), or the machine's own where it has one."""

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

STAND_IN = Path(__file__).with_name("pbs_standin.py")
FRONT = Path(__file__).with_name("pbs_front.py")
COMMANDS = ("qsub", "qstat", "qselect", "qdel", "qrls")
REAL = shutil.which("qsub")
OWN_FILE = Path("~/.config/snakemake/pbs.yaml")
"""The person's own values, for the machine's own PBS."""
DEADLINE = 60.0
REAL_DEADLINE = 600.0
"""Seconds for a real PBS, which schedules and kills in its own time."""


@dataclass
class Pbs:
    """A stand-in server.

    Args:
        folder: where it keeps its jobs.
        environment: in which its commands are found.
    """

    folder: Path
    environment: dict[str, str]
    values: str = "queue: prod\naccount: proj\n"
    """A person's file that it takes jobs with."""
    patience: int = 5
    """Seconds that it may take to tell of a job's end after the job wrote its exit status."""

    def faults(self, command: str, *names: str) -> None:
        """Let the next calls of a command have these faults, one each; `NAME*` for all of them."""
        part = self.folder / f"{command}.part"
        part.write_text(" ".join(names))
        part.replace(self.folder / f"{command}.faults")

    def set(self, **settings: Any) -> None:
        """Change how the server works: slots, purged, first, ending_seconds, history."""
        (self.folder / "settings.json").write_text(json.dumps(settings))

    def calls(self, command: str) -> list[tuple[float, list[str]]]:
        """When a command was called, and with what."""
        path = self.folder / "calls"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
        return [(line[0], line[2:]) for line in lines if line[1] == command]

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that it was ever given."""
        paths = sorted((self.folder / "jobs").glob("*.json"), key=lambda path: int(path.stem))
        jobs = [json.loads(path.read_text()) for path in paths]
        return [{**job, "id": f"{job['number']}.pbs01"} for job in jobs]

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Call one of its commands."""
        return subprocess.run(
            [command, *arguments], env=self.environment, capture_output=True, text=True, check=False
        )

    def stop(self) -> None:
        """End what still runs."""
        (self.folder / "stopped").touch()
        for job in self.jobs():
            if job["state"] != "F":
                self.run("qdel", job["id"])
        wait_for(lambda: all(job["state"] == "F" for job in self.jobs()), "jobs to end")


@dataclass
class RealPbs(Pbs):
    """The machine's own server behind `pbs_front.py`.

    Args:
        programs: folder of its commands.
    """

    programs: Path = Path("/usr/bin")
    patience: int = 60
    """A job that is killed may be over 25 s after it has written its exit status."""

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that the test gave it."""
        ids = [path.name for path in (self.folder / "jobs").iterdir()]
        if not ids:  # qstat without ids is about everybody's jobs
            return []
        command = [str(self.programs / "qstat"), "-E", "-x", "-f", "-F", "json", *ids]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = {"state": "job_state", "account": "Account_Name", "name": "Job_Name"}
        return [
            {
                "id": job_id, "number": int(job_id.partition(".")[0]),
                "substate": job["substate"], "queue": job["queue"],
                **{name: job.get(key) for name, key in names.items()},
            }
            for job_id, job in json.loads(told, strict=False).get("Jobs", {}).items()
        ]  # fmt: skip


def stand_in(folder: Path) -> Pbs:
    """Set a stand-in up in an empty folder."""
    return Pbs(folder, _commands(folder, STAND_IN, COMMANDS))


def real(folder: Path, programs: Path) -> Pbs:
    """Set a front of a server up in an empty folder, by the folder of its commands."""
    environment = _commands(folder, FRONT, COMMANDS, str(programs))
    own = OWN_FILE.expanduser()
    values = own.read_text() if own.exists() else ""
    return RealPbs(folder, environment, values, programs=programs)


def _commands(folder: Path, script: Path, names: Iterable[str], *more: str) -> dict[str, str]:
    """Write commands that run a script; the environment that they are found in."""
    (folder / "bin").mkdir(parents=True)
    (folder / "jobs").mkdir()
    for command in names:
        path, words = folder / "bin" / command, [sys.executable, "-IS", str(script), command]
        path.write_text(f'#!/bin/sh\nexec {shlex.join([*words, str(folder), *more])} "$@"\n')
        path.chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path}


def wait_for(condition: Callable[[], object], what: str, seconds: float | None = None) -> None:
    """Wait until something is so, for so long at most, or for `DEADLINE`.

    Raises:
        AssertionError: it is not so in time.
    """
    seconds = DEADLINE if seconds is None else seconds
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)


class Controller:
    """A Snakemake that runs a workflow on a PBS, in the background.

    Args:
        folder: its working directory, with a Snakefile.
        environment: of the process.
    """

    def __init__(self, folder: Path, environment: dict[str, str], *arguments: str) -> None:
        self.log = folder / f"controller-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "snakemake", "--executor", "pbs", "--jobs", "20",
                    "--scheduler", "greedy", "--seconds-between-status-checks", "1",
                    "--latency-wait", "10", "--default-resources", "runtime=5",
                    "--pbs-user-file", str(folder / "pbs.yaml"), *arguments,
                ],
                cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the controller alone."""
        self.process.send_signal(number)

    def wait(self, seconds: float | None = None) -> int:
        """Its exit status; it is waited for so long at most, or for `DEADLINE`."""
        return self.process.wait(DEADLINE if seconds is None else seconds)

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()
