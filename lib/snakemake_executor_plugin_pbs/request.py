"""Options of qsub, from a job's resources and the user file."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from .errors import UserError
from .user_file import UserFile, personal_value

NAME_LENGTH = 200  # PBS allows 236
# Values of a user: the user file may set them for all rules, and for each rule.
PERSONAL = ("account", "queue", "filesystems", "place", "select", "container", "pbs_extra")
# Options that the executor sets itself.
OWN_OPTIONS = ("-N", "-J", "-o", "-e", "-j", "-k", "-I", "-X", "-z", "-S", "-C")


@dataclass(frozen=True)
class SubmitRequest:
    """Options of the submit command for one job."""

    arguments: tuple[str, ...]  # without those that the submission adds
    queue: str  # empty: the server's default queue
    seconds: int | None = None  # walltime; None: the queue's default
    container: str = ""  # image that the job has as JOB_CONTAINER


def build_request(
    rule: str, threads: int, resources: Mapping[str, Any], user: UserFile
) -> SubmitRequest:
    """Convert resources into options of qsub; `threads`: cores per node without ncpus."""

    def personal(name: str) -> str:
        return personal_value(name, name, rule=rule, resources=resources, user=user)

    queue = personal("queue")
    arguments = []
    if queue:
        arguments += ["-q", queue]
    if account := personal("account"):
        arguments += ["-A", account]
    arguments += [
        "-l",
        f"select={_select(rule, threads, resources=resources, template=personal('select'))}",
    ]
    if place := personal("place"):
        arguments += ["-l", f"place={place}"]
    if num_spare_nodes(rule, resources):
        arguments += ["-W", "tolerate_node_failures=all"]  # the job continues without a lost node
    seconds = None
    if (minutes := resources.get("runtime")) is not None:
        seconds = walltime(rule, minutes)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        arguments += ["-l", f"walltime={clock}"]
    if filesystems := personal("filesystems"):
        arguments += ["-l", f"filesystems={filesystems}"]
    extra = extra_options(
        rule, "pbs_extra", text=personal("pbs_extra"), is_own_option=_is_own_option
    )
    return SubmitRequest((*arguments, *extra), queue, seconds, personal("container"))


def walltime(rule: str, minutes: Any) -> int:
    """Convert minutes into whole seconds."""
    try:
        seconds = round(float(minutes) * 60)
    except (TypeError, ValueError):
        seconds = 0
    if seconds <= 0:
        raise UserError(f"rule {rule}: runtime: {minutes!r}: must be a positive number of minutes")
    return seconds


def job_name(rule: str, wildcards: Mapping[str, str], *, token: str) -> str:
    """Readable and unique name of a job in PBS: rule, wildcards, token."""
    text = "-".join(filter(None, (rule, *map(str, wildcards.values()))))
    clean = re.sub(r"[^A-Za-z0-9_.-]+", "_", text)
    start = clean if clean[:1].isalpha() else f"j{clean}"
    return f"{start[: NAME_LENGTH - len(token) - 1]}.{token}"


def num_spare_nodes(rule: str, resources: Mapping[str, Any]) -> int:
    """Spare nodes that a job requests, to replace lost nodes."""
    return whole_number(rule, "spare_nodes", value=resources.get("spare_nodes", 0), lowest=0)


def _select(rule: str, threads: int, *, resources: Mapping[str, Any], template: str) -> str:
    values = {
        "nodes": resources.get("nodes", 1),
        "ncpus": resources.get("ncpus", threads),
        "ngpus": resources.get("ngpus", 0),
        "mem_mb": resources.get("mem_mb", 0),
    }
    for name, value in values.items():
        whole_number(rule, name, value=value, lowest=1 if name in ("nodes", "ncpus") else 0)
    values["nodes"] += (spare := num_spare_nodes(rule, resources))
    if template:
        try:
            names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
            if spare and "nodes" not in names:
                raise UserError(
                    f"rule {rule}: select: {template!r}: spare_nodes is {spare}, but {{nodes}} is "
                    "missing here; write it in place of the number of nodes"
                )
            if not names - set(values):
                return template.format(**values)
        except ValueError:
            pass
        raise UserError(
            f"rule {rule}: select: {template!r}: is not a valid template; placeholders are "
            f"{', '.join(f'{{{name}}}' for name in values)}"
        )
    parts = [f"{values['nodes']}", f"ncpus={values['ncpus']}"]
    if values["ngpus"]:
        parts.append(f"ngpus={values['ngpus']}")
    if values["mem_mb"]:
        parts.append(f"mem={values['mem_mb']}mb")
    return ":".join(parts)


def _is_own_option(argument: str) -> bool:
    return argument[:2] in OWN_OPTIONS


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
