"""PBS's commands: qsub, qstat, qselect, qdel, each with a time limit and its errors sorted.

They run in sessions of their own, so that Ctrl-C in a terminal reaches the controller alone.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .replies import Answer, number, parse

# What qsub says where the request did not reach the server, or met a limit on jobs.
_LATER = (
    "cannot connect", "could not connect", "connection refused", "no route to host",
    "server shutting down", "would exceed", "limit on number of jobs", "maximum number of jobs",
    "too many jobs", "job limit", "queue limit", "per-user limit", "per user limit",
)  # fmt: skip
# What it says where it lost the server on the way: whether the job is there is unknown.
_UNSURE = (
    "timeout", "timed out", "connection reset", "end of file", "broken pipe",
    "communication failure", "failed to recv data",
)  # fmt: skip
_NO_JOB = ("unknown job id", "has finished", "job is finished")
# What qstat says to -x if the server keeps no history.
_NO_HISTORY = "not configured to maintain job history"
# What a qstat, or a site's wrapper of it, says to -E if it does not know that option.
_NO_EXPRESS = ("invalid option", "illegal option", "usage:")


class Refused(Exception):
    """PBS will not have this job; asking again would not help."""


class Later(Exception):
    """PBS did not take this job now; it has too many, or is not there."""


class Unsure(Exception):
    """Whether PBS has this job cannot be told; it must be looked for."""


class Unreachable(Exception):
    """PBS did not answer."""


@dataclass
class Done:
    """How a command ended."""

    code: int
    output: str
    errors: str

    @property
    def message(self) -> str:
        """What it said, in one line."""
        return " ".join((self.errors.strip() or self.output.strip() or "no message").split())


class Commands:
    """The server, through its commands; a subclass has those of another batch system.

    Args:
        timeout: seconds after which a command is ended.
    """

    submitting: tuple[str, ...] = ("qsub",)
    deleting: tuple[str, ...] = ("qdel",)
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
        """Submit a job; returns its id.

        Raises:
            Refused, Later, Unsure: as their names say.
        """
        try:
            done = self._run([*self.submitting, *arguments, str(script)])
        except subprocess.TimeoutExpired:
            raise Unsure(f"no answer in {self.timeout:g} s") from None
        job_id = self.submitted(done.output)
        if done.code == 0 and job_id:
            return job_id
        told = done.message.removeprefix(f"{self.submitting[0]}: ")
        message = told.lower()
        if any(text in message for text in self.later):
            raise Later(told)
        if done.code <= 0 or any(text in message for text in self.unsure):
            raise Unsure(told)
        raise Refused(f"{told} (exit status {done.code})")

    def submitted(self, output: str) -> str:
        """Id of the job in what the submitting command printed; empty where there is none."""
        last = (output.split() or [""])[-1]
        return last if last.partition(".")[0].isdigit() else ""

    def status(self, ids: Sequence[str]) -> Answer:
        """Ask about all these jobs; an answer with a fault if it cannot be used.

        `qstat -E` (PBS 18.1 and later) sends the server one request for all ids, and omits jobs
        that the server does not know. Without -E, qstat sends one request for each id, and after
        OpenPBS 23.06 it prints only the first job (issue 2672 of OpenPBS). So ids that a whole
        reply omits are asked about once more: the server denies them, or the reply was incomplete.
        """
        answer = self._ask(ids)
        omitted = [one for one in ids if number(one) not in answer.jobs.keys() | answer.unknown]
        if not omitted or answer.fault:
            return answer
        second = self._ask(omitted)
        answer.jobs |= second.jobs
        answer.unknown |= second.unknown
        answer.omitted = len(omitted) if second.jobs else 0
        if not answer.jobs:
            answer.fault = second.fault
        return answer

    def _ask(self, ids: Sequence[str]) -> Answer:
        """Call qstat once, with the options that it and the server are known to take."""
        options = [*self._express, *self._history, "-f", "-F", "json"]
        try:
            done = self._run(["qstat", *options, *ids], stoppable=True)
        except subprocess.TimeoutExpired:
            return Answer(fault=f"no answer in {self.timeout:g} s")
        said = done.errors.lower()
        if self._express and done.code and any(text in said for text in _NO_EXPRESS):
            self._express = []
            return self._ask(ids)
        if self._history and _NO_HISTORY in said:
            self._history = []
            return self._ask(ids)
        answer = parse(done.code, done.output, done.errors)
        if self._express and answer.unknown and not answer.jobs and not answer.fault:
            # One request, one refusal, which names one of the ids.
            answer.unknown = {number(one) for one in ids}
        return answer

    def find(self, name: str) -> list[str]:
        """Ids of the jobs of this name that have not ended.

        Raises:
            Unreachable: there was no answer.
        """
        try:
            done = self._run(self.finding(name))
        except subprocess.TimeoutExpired:
            raise Unreachable(f"no answer in {self.timeout:g} s") from None
        if done.code:
            raise Unreachable(done.message)
        return done.output.split()

    def finding(self, name: str) -> list[str]:
        """The command that prints ids of jobs of a name."""
        return ["qselect", "-N", name]

    def delete(self, ids: Sequence[str]) -> str:
        """Delete jobs, waiting or running; returns what went wrong, or nothing.

        That one of them has ended already is as good.
        """
        try:
            done = self._run([*self.deleting, *ids])
        except subprocess.TimeoutExpired:
            return f"no answer in {self.timeout:g} s"
        wrong = [
            line
            for line in done.errors.splitlines()
            if line.strip() and not any(text in line.lower() for text in self.no_job)
        ]
        if done.code and not done.errors.strip():
            return f"exit status {done.code}"
        return wrong[0] if done.code and wrong else ""

    def stop_status(self) -> None:
        """End a call of qstat that is under way, and have none begin."""
        self._stopped.set()
        if (process := self._status) is not None:
            _end(process)

    def environment(self) -> dict[str, str] | None:
        """What the commands are run in; None: what this process has."""
        return None

    def _run(self, command: list[str], *, stoppable: bool = False) -> Done:
        if stoppable and self._stopped.is_set():
            return Done(1, "", "stopped")
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", start_new_session=True, env=self.environment(),
            )  # fmt: skip
        except OSError as error:
            return Done(127, "", f"cannot connect: {command[0]}: {error.strerror}")
        if stoppable:
            self._status = process
            if self._stopped.is_set():
                _end(process)
        try:
            output, errors = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1)
            raise
        finally:
            self._status = None
        return Done(process.returncode, output, errors)


def _end(process: subprocess.Popen[str]) -> None:
    """End a command, and what it started: a site's may be a wrapper script."""
    with suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
