"""Calls of PBS's commands qsub, qstat, qselect and qdel."""

import subprocess
from collections.abc import Sequence

from .commands import Commands
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


class PbsCommands(Commands):
    """PBS, called by its commands."""

    submit_command, delete_command = "qsub", "qdel"
    later, unsure, no_job = _LATER, _UNSURE, _NO_JOB

    def __init__(self, timeout: float = 60) -> None:
        super().__init__(timeout)
        self._history = ["-x"]
        self._express = ["-E"]

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

    def find_command(self, name: str) -> list[str]:
        return ["qselect", "-N", name]
