"""Batch systems, and calls of their commands with a time limit and typed errors.

Each runs in its own session, so that Ctrl-C in a terminal reaches only the controller.
"""

import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .states import JobStatus


class Refused(Exception):
    """The server refuses this job, and would refuse it again."""


class Later(Exception):
    """The server cannot take this job now: it has too many jobs, or is not reachable."""


class Unsure(Exception):
    """The server may have this job; its id must be looked up."""


class Unreachable(Exception):
    """The server did not answer."""


@dataclass
class CommandResult:
    """Exit status and output of a command."""

    code: int
    output: str
    errors: str

    @property
    def message(self) -> str:
        """Its error output, or else its output, in one line."""
        return " ".join((self.errors.strip() or self.output.strip() or "no message").split())


@dataclass
class StatusReply:
    """Parsed reply to one status call; `jobs` and `unknown` have the ids' numbers."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    fault: str = ""  # why some or all of the reply is unusable
    omitted: int = 0  # jobs that the server knows but the first reply lacks


def number(job_id: str) -> str:
    """Number of an id: the server's name after it is not always written the same way."""
    return job_id.strip().partition(".")[0]


@dataclass(frozen=True)
class Dialect:
    """A batch system.

    Args:
        label: prefix of messages, and name of the folder of the records.
        options: options of the submit command, from the job's name and the file for its output.
        avoid: options so that a job does not get some hosts, from its own options and the hosts;
            None: the batch system cannot do that.
        refused: reason why this file cannot be in a folder, or an empty string.
    """

    label: str
    system: str
    submit: str
    status: str
    delete: str
    release: str
    id_variable: str
    read: Callable[[Mapping[str, Any]], JobStatus | None]
    options: Callable[[str, Path], tuple[str, ...]]
    avoid: Callable[[Sequence[str], Sequence[str]], tuple[str, ...]] | None = None
    refused: Callable[[Path], str] = lambda _: ""


class Commands(ABC):
    """Server that is called by its commands, which a subclass names.

    A command is killed after `timeout` seconds.
    """

    submit_command: str
    delete_command: str
    later: tuple[str, ...]
    """Errors of the submit command: the job did not reach the server, or there are too many."""
    unsure: tuple[str, ...]
    """Errors of the submit command: the connection was lost, so the server may have the job."""
    no_job: tuple[str, ...]
    """Errors of the delete command: the job has ended."""

    def __init__(self, timeout: float = 60) -> None:
        self.timeout = timeout
        self._status: subprocess.Popen[str] | None = None
        self._stopped = threading.Event()

    def submit(self, arguments: Sequence[str], script: Path) -> str:
        """Submit a job and return its id; Refused, Later, Unsure: the command failed."""
        try:
            result = self._run([self.submit_command, *arguments, str(script)])
        except subprocess.TimeoutExpired:
            raise Unsure(f"no answer in {self.timeout:g} s") from None
        job_id = self.parse_job_id(result.output)
        if result.code == 0 and job_id:
            return job_id
        message = result.message.removeprefix(f"{self.submit_command}: ")
        lower = message.lower()
        if any(text in lower for text in self.later):
            raise Later(message)
        if result.code <= 0 or any(text in lower for text in self.unsure):
            raise Unsure(message)
        raise Refused(f"{message} (exit status {result.code})")

    @abstractmethod
    def parse_job_id(self, output: str) -> str:
        """Job id in the output of the submit command, or an empty string."""

    @abstractmethod
    def status(self, ids: Sequence[str]) -> StatusReply:
        """Ask for the status of jobs; the answer has a fault if it is unusable."""

    @abstractmethod
    def find_command(self, name: str) -> list[str]:
        """Command that prints the ids of the jobs of a name that have not ended."""

    def find(self, name: str) -> list[str]:
        """Ids of the jobs of this name that have not ended; Unreachable: no answer."""
        try:
            result = self._run(self.find_command(name))
        except subprocess.TimeoutExpired:
            raise Unreachable(f"no answer in {self.timeout:g} s") from None
        if result.code:
            raise Unreachable(result.message)
        return result.output.split()

    def delete(self, ids: Sequence[str]) -> str:
        """Delete waiting and running jobs; return an error message, or an empty string.

        It is no error if a job has already ended.
        """
        try:
            result = self._run([self.delete_command, *ids])
        except subprocess.TimeoutExpired:
            return f"no answer in {self.timeout:g} s"
        errors = [
            line
            for line in result.errors.splitlines()
            if line.strip() and not any(text in line.lower() for text in self.no_job)
        ]
        if result.code and not result.errors.strip():
            return f"exit status {result.code}"
        return errors[0] if result.code and errors else ""

    def stop_status(self) -> None:
        """Kill a running status call, and start no other one."""
        self._stopped.set()
        if (process := self._status) is not None:
            _kill(process)

    def environment(self) -> dict[str, str] | None:
        """Environment of the commands; None: this process's environment."""
        return None

    def _run(self, command: list[str], *, stoppable: bool = False) -> CommandResult:
        if stoppable and self._stopped.is_set():
            return CommandResult(1, "", "stopped")
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", start_new_session=True, env=self.environment(),
            )  # fmt: skip
        except OSError as error:
            return CommandResult(127, "", f"cannot connect: {command[0]}: {error.strerror}")
        if stoppable:
            self._status = process
            if self._stopped.is_set():
                _kill(process)
        try:
            output, errors = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1)
            raise
        finally:
            self._status = None
        return CommandResult(process.returncode, output, errors)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command and its children: a site's command may be a wrapper script."""
    with suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
