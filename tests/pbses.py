"""A PBS for tests: the stand-in of tests/pbs_standin.py, or the machine's own where it has one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).with_name("pbs_standin.py")
COMMANDS = ("qsub", "qstat", "qselect", "qdel")
REAL = shutil.which("qsub")
DEADLINE = 60.0


@dataclass
class Pbs:
    """A stand-in server.

    Args:
        folder: where it keeps its jobs.
        environment: in which its commands are found.
    """

    folder: Path
    environment: dict[str, str]

    def faults(self, command: str, *names: str) -> None:
        """Let the next calls of a command have these faults, one each; `NAME*` for all of them."""
        part = self.folder / f"{command}.part"
        part.write_text(" ".join(names))
        part.replace(self.folder / f"{command}.faults")

    def set(self, **settings: Any) -> None:
        """Change how the server works: slots, purged, first, ending_seconds."""
        (self.folder / "settings.json").write_text(json.dumps(settings))

    def calls(self, command: str) -> list[tuple[float, list[str]]]:
        """When a command was called, and with what."""
        path = self.folder / "calls"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
        return [(line[0], line[2:]) for line in lines if line[1] == command]

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that it was ever given."""
        paths = sorted((self.folder / "jobs").glob("*.json"), key=lambda path: int(path.stem))
        return [json.loads(path.read_text()) for path in paths]

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
                self.run("qdel", f"{job['number']}.pbs01")
        wait_for(lambda: all(job["state"] == "F" for job in self.jobs()), "jobs to end")


def stand_in(folder: Path) -> Pbs:
    """Set a stand-in up in an empty folder."""
    (folder / "bin").mkdir(parents=True)
    (folder / "jobs").mkdir()
    for command in COMMANDS:
        path = folder / "bin" / command
        path.write_text(
            f'#!/bin/sh\nexec {sys.executable} -IS {STAND_IN} {command} {folder} "$@"\n'
        )
        path.chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return Pbs(folder, {**os.environ, "PATH": path})


def wait_for(condition: Callable[[], object], what: str, seconds: float = DEADLINE) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: it is not so in time.
    """
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

    def wait(self, seconds: float = DEADLINE) -> int:
        """Its exit status."""
        return self.process.wait(seconds)

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()
