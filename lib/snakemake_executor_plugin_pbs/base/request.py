"""Requests of jobs: values that all batch systems have, from a job's resources."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UserError

NAME_LENGTH = 200  # PBS allows 236


@dataclass(frozen=True)
class SubmitRequest:
    """Options of the submit command for one job."""

    arguments: tuple[str, ...]  # without the submission's own
    queue: str  # empty: the server's default queue
    seconds: int | None = None  # walltime; None: the queue's default
    container: str = ""  # image that the job has as JOB_CONTAINER


def job_name(rule: str, wildcards: Mapping[str, str], *, token: str) -> str:
    """Readable and unique name of a job in PBS: rule, wildcards, token."""
    text = "-".join(filter(None, (rule, *map(str, wildcards.values()))))
    clean = re.sub(r"[^A-Za-z0-9_.-]+", "_", text)
    start = clean if clean[:1].isalpha() else f"j{clean}"
    return f"{start[: NAME_LENGTH - len(token) - 1]}.{token}"


def num_spare_nodes(rule: str, resources: Mapping[str, Any]) -> int:
    """Spare nodes that a job requests, to replace lost nodes."""
    return whole_number(rule, "spare_nodes", value=resources.get("spare_nodes", 0), lowest=0)


def whole_number(rule: str, name: str, *, value: Any, lowest: int = 1) -> int:
    """Check that a resource is a whole number, and return it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise UserError(
            f"rule {rule}: {name}: {value!r}: must be a whole number of at least {lowest}"
        )
    return value


def extra_options(
    rule: str, resource: str, *, text: str, is_own_option: Callable[[str], bool]
) -> list[str]:
    """Split a resource with more options of the submit command, as a shell does.

    Options that the executor sets itself (`is_own_option`) are refused.
    """
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise UserError(f"rule {rule}: {resource}: {text!r}: {error}") from None
    for argument in arguments:
        if is_own_option(argument):
            raise UserError(
                f"rule {rule}: {resource}: {argument}: the executor sets this itself; leave it out"
            )
    return arguments


def queue_limits(text: str) -> dict[str, int]:
    """Parse `debug=1 prod=20 *=50`: the number of jobs that may wait in each queue.

    * is any other queue.
    """
    limits = {}
    for part in text.replace(",", " ").split():
        name, equals, number = part.rpartition("=")
        if not number.isdigit() or int(number) < 1 or bool(equals) != bool(name):
            raise UserError(f"max-queued: {part!r}: write QUEUE=N, *=N or N, with N at least 1")
        limits[name or "*"] = int(number)
    return limits
