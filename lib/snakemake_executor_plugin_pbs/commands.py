"""Calls of PBS's commands qsub, qstat, qselect and qdel, and the parser of qstat's output.

The JSON of qstat can be invalid: PBS writes some values in a form that is not JSON, and a reply can
be truncated. Jobs that are complete in it are used, since PBS writes one attribute per line.
"""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .base.commands import Commands, Dialect, StatusReply, number
from .states import read

ATTRIBUTES = "job_state|substate|Exit_status|comment|Hold_Types|queue|Job_Name"
_JOB = re.compile(r'^\t\t"([^"]+)":\t\{\n(.*?)^\t\t\},?$', re.MULTILINE | re.DOTALL)
_ATTRIBUTE = re.compile(rf'^\t\t\t"({ATTRIBUTES})":\t(?:"(.*)"|(-?\d+)),?$', re.MULTILINE)
_UNKNOWN = re.compile(r"Unknown Job Id (\S+)", re.IGNORECASE)
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


def parse(code: int, output: str, *, errors: str) -> StatusReply:
    """Parse a reply of `qstat -x -f -F json`.

    Args:
        code: exit status of qstat. It is not 0 if a single job is unknown, so it proves nothing
            alone.
        errors: standard error, which names unknown jobs.
    """
    answer = StatusReply(unknown={number(job_id) for job_id in _UNKNOWN.findall(errors)})
    try:
        reply = json.loads(output, strict=False)
        jobs = reply.get("Jobs", {})
        complete = "timestamp" in reply and isinstance(jobs, dict)
    except (ValueError, AttributeError):
        complete = False
    if complete:
        answer.jobs = {number(name): job for name, job in jobs.items() if isinstance(job, dict)}
    else:
        answer.jobs = _salvage(output)
        answer.fault = "its reply is not complete JSON" if output.strip() else "its reply is empty"
    if code and not answer.jobs and not answer.unknown:
        last_line = errors.strip().splitlines()[-1:] or ["no message"]
        answer.fault = f"exit status {code}: {last_line[0]}"
    # A faulty reply can contain both; a job that it reports exists.
    answer.unknown -= set(answer.jobs)
    return answer


def _salvage(output: str) -> dict[str, dict[str, Any]]:
    """Complete jobs in an incomplete reply."""
    return {
        number(name): {
            key: text if text or not digits else int(digits)
            for key, text, digits in reversed(_ATTRIBUTE.findall(block))
        }
        for name, block in _JOB.findall(output)
    }


def _options(name: str, output: Path) -> tuple[str, ...]:
    return "-N", name, "-S", "/bin/bash", "-j", "oe", "-o", str(output)


def _refused(folder: Path) -> str:
    """Reason why `qsub -o` refuses files in a folder (prepare_path.c of OpenPBS; 23.06)."""
    name = str(folder)
    if invalid := sorted({char for char in name if not " " <= char <= "~"}):
        return f"has {', '.join(map(repr, invalid))}, and qsub takes only printable ASCII"
    if ":" in name:
        return "has a colon; PBS before 22.05 takes the part before it as a host name"
    if len(name) > _LONGEST:
        return f"has {len(name)} characters, and qsub takes about {_LONGEST}"
    return ""


_LONGEST = 900
"""Characters of a folder; qsub takes about 1,000 characters of a path."""

PBS = Dialect(
    "pbs", "PBS", "qsub", "qstat", "qdel", "qrls", "PBS_JOBID", read, _options, refused=_refused
)
