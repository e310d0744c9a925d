"""Parser of the output of qstat: jobs that the server reports, and ids that it does not know.

The JSON can be invalid: PBS writes some values in a form that is not JSON, and a reply can be
truncated. Jobs that are complete in it are used, since PBS writes one attribute per line.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

ATTRIBUTES = "job_state|substate|Exit_status|comment|Hold_Types|queue|Job_Name"
_JOB = re.compile(r'^\t\t"([^"]+)":\t\{\n(.*?)^\t\t\},?$', re.MULTILINE | re.DOTALL)
_ATTRIBUTE = re.compile(rf'^\t\t\t"({ATTRIBUTES})":\t(?:"(.*)"|(-?\d+)),?$', re.MULTILINE)
_UNKNOWN = re.compile(r"Unknown Job Id (\S+)", re.IGNORECASE)


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
