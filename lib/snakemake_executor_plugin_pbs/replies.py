"""What qstat prints, taken apart: the jobs that it tells of, and those that it does not know.

Its JSON is at times broken (values that are no JSON, a reply cut off). What is whole is used then,
job by job, since PBS writes one attribute a line.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

TAKEN = "job_state|substate|Exit_status|comment|Hold_Types|queue|Job_Name"
_JOB = re.compile(r'^\t\t"([^"]+)":\t\{\n(.*?)^\t\t\},?$', re.MULTILINE | re.DOTALL)
_ATTRIBUTE = re.compile(rf'^\t\t\t"({TAKEN})":\t(?:"(.*)"|(-?\d+)),?$', re.MULTILINE)
_UNKNOWN = re.compile(r"Unknown Job Id (\S+)", re.IGNORECASE)


@dataclass
class Answer:
    """What one call of qstat told; `jobs` and `unknown` by the ids' numbers."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    fault: str = ""  # why some or all of it could not be used
    omitted: int = 0  # jobs that the server knows and the first reply lacks


def number(job_id: str) -> str:
    """The part of an id that is the same however the server's name is written."""
    return job_id.strip().partition(".")[0]


def parse(code: int, output: str, errors: str) -> Answer:
    """Take a reply of `qstat -x -f -F json` apart.

    Args:
        code: exit status of qstat. It is not 0 as soon as one of the jobs is unknown, so it alone
            says nothing.
        output: its standard output.
        errors: its standard error, which names unknown jobs.
    """
    answer = Answer(unknown={number(found) for found in _UNKNOWN.findall(errors)})
    try:
        reply = json.loads(output, strict=False)
        jobs = reply.get("Jobs", {})
        whole = "timestamp" in reply and isinstance(jobs, dict)
    except (ValueError, AttributeError):
        whole = False
    if whole:
        answer.jobs = {number(name): job for name, job in jobs.items() if isinstance(job, dict)}
    else:
        answer.jobs = _salvage(output)
        answer.fault = "its reply is no whole JSON" if output.strip() else "its reply is empty"
    if code and not answer.jobs and not answer.unknown:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        answer.fault = f"exit status {code}: {last[0]}"
    # A fault may mix both up; a job that is told of is there.
    answer.unknown -= set(answer.jobs)
    return answer


def _salvage(output: str) -> dict[str, dict[str, Any]]:
    """Jobs that are whole in a reply that is not."""
    return {
        number(name): {
            key: text if text or not digits else int(digits)
            for key, text, digits in reversed(_ATTRIBUTE.findall(block))
        }
        for name, block in _JOB.findall(output)
    }
