"""Calls of PBS's commands qsub, qstat, qselect and qdel, with a time limit and typed errors.

Each runs in its own session, so that Ctrl-C in a terminal reaches only the controller.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .replies import StatusReply, number, parse

# Errors of qsub: the request did not reach the server, or a limit on jobs is reached.
_LATER = (
    "cannot connect", "could not connect", "connection refused", "no route to host",
    "server shutting down", "would exceed", "limit on number of jobs", "maximum number of jobs",
    "too many jobs", "job limit", "queue limit", "per-user limit", "per user limit",
)  # fmt: skip
# Errors of qsub: the connection was lost, so the server may have the job.
_UNSURE = (
    "timeout", "timed out", "connection reset", "end of file", "broken pipe",
    "communication failure", "failed to recv data",
)  # fmt: skip
_NO_JOB = ("unknown job id", "has finished", "job is finished")
# Error of `qstat -x` if the server keeps no history.
_NO_HISTORY = "not configured to maintain job history"
# Errors of `qstat -E` if it, or a site's wrapper of it, does not know that option.
_NO_EXPRESS = ("invalid option", "illegal option", "usage:")


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


class Commands:
    """Server that is called by its commands. A subclass has those of another batch system.

    A command is killed after `timeout` seconds.
    """

    submit_command: tuple[str, ...] = ("qsub",)
    delete_command: tuple[str, ...] = ("qdel",)
    later: tuple[str, ...] = _LATER
    unsure: tuple[str, ...] = _UNSURE
    no_job: tuple[str, ...] = _NO_JOB

    def __init__(self, timeout: float = 60) -> None:
        self.timeout = timeout
        self._status: subprocess.Popen[str] | None = None
        self._history = ["-x"]
        self._express = ["-E"]
        self._stopped = threading.Event()

    def submit(self, arguments: Sequence[str], script: Path) -> str:
        """Submit a job and return its id; Refused, Later, Unsure: the command failed."""
        try:
            result = self._run([*self.submit_command, *arguments, str(script)])
        except subprocess.TimeoutExpired:
            raise Unsure(f"no answer in {self.timeout:g} s") from None
        job_id = self.parse_job_id(result.output)
        if result.code == 0 and job_id:
            return job_id
        message = result.message.removeprefix(f"{self.submit_command[0]}: ")
        lower = message.lower()
        if any(text in lower for text in self.later):
            raise Later(message)
        if result.code <= 0 or any(text in lower for text in self.unsure):
            raise Unsure(message)
        raise Refused(f"{message} (exit status {result.code})")

    def parse_job_id(self, output: str) -> str:
        """Job id in the output of the submit command, or an empty string."""
        last_word = (output.split() or [""])[-1]
        return last_word if last_word.partition(".")[0].isdigit() else ""

    def status(self, ids: Sequence[str]) -> StatusReply:
        """Ask for the status of jobs; the answer has a fault if it is unusable.

        `qstat -E` (PBS 18.1 and later) sends the server one request for all ids, and omits jobs
        that the server does not know. Without -E, qstat sends one request for each id, and after
        OpenPBS 23.06 it prints only the first job (issue 2672 of OpenPBS). So a second call asks
        about ids that a complete reply omits: the server does not know them, or omitted them.
        """
        answer = self._ask(ids)
        known = answer.jobs.keys() | answer.unknown
        omitted = [job_id for job_id in ids if number(job_id) not in known]
        if not omitted or answer.fault:
            return answer
        second = self._ask(omitted)
        answer.jobs |= second.jobs
        answer.unknown |= second.unknown
        answer.omitted = len(omitted) - len(second.unknown) if second.jobs else 0
        if not answer.jobs:
            answer.fault = second.fault
        return answer

    def _ask(self, ids: Sequence[str]) -> StatusReply:
        """Call qstat once, with the options that it and the server support."""
        options = [*self._express, *self._history, "-f", "-F", "json"]
        try:
            result = self._run(["qstat", *options, *ids], stoppable=True)
        except subprocess.TimeoutExpired:
            return StatusReply(fault=f"no answer in {self.timeout:g} s")
        errors = result.errors.lower()
        if self._express and result.code and any(text in errors for text in _NO_EXPRESS):
            self._express = []
            return self._ask(ids)
        if self._history and _NO_HISTORY in errors:
            self._history = []
            return self._ask(ids)
        answer = parse(result.code, result.output, errors=result.errors)
        if self._express and answer.unknown and not answer.jobs and not answer.fault:
            # The only error names one of the ids, but is about all of them.
            answer.unknown = {number(job_id) for job_id in ids}
        return answer

    def find(self, name: str) -> list[str]:
        """Ids of the jobs of this name that have not ended; Unreachable: no answer."""
        try:
            result = self._run(self.find_command(name))
        except subprocess.TimeoutExpired:
            raise Unreachable(f"no answer in {self.timeout:g} s") from None
        if result.code:
            raise Unreachable(result.message)
        return result.output.split()

    def find_command(self, name: str) -> list[str]:
        return ["qselect", "-N", name]

    def delete(self, ids: Sequence[str]) -> str:
        """Delete waiting and running jobs; return an error message, or an empty string.

        It is no error if a job has already ended.
        """
        try:
            result = self._run([*self.delete_command, *ids])
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
        """Environment of the commands; None: that of this process."""
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
