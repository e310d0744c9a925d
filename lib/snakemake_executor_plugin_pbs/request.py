"""What to ask PBS for: a job's resources, and the user's own file, as arguments of qsub."""

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from .errors import UserError

NAME_LENGTH = 200  # PBS takes 236
# What differs from person to person; the user's file may say it for all rules, and for each.
PERSONAL = ("account", "queue", "filesystems", "place", "select", "pbs_extra")
# Options that the executor itself depends on.
OWN_OPTIONS = ("-N", "-J", "-o", "-e", "-j", "-k", "-I", "-X", "-z", "-S", "-C")


@dataclass(frozen=True)
class UserFile:
    """Values of one person.

    Args:
        path: where they come from, for messages.
        common: for all rules.
        rules: rule name to what is particular to it.
    """

    path: Path
    common: Mapping[str, str]
    rules: Mapping[str, Mapping[str, str]]

    def value(self, rule: str, name: str) -> str | None:
        """A value for a rule, or None."""
        return self.rules.get(rule, {}).get(name, self.common.get(name))


def read_user_file(path: Path, known: tuple[str, ...] = PERSONAL) -> UserFile:
    """Read the user's file; one that is not there says nothing.

    Args:
        path: of the file.
        known: names that it may hold.

    Raises:
        UserError: it is no mapping of known names to texts.
    """
    if not path.exists():
        return UserFile(path, {}, {})
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8; save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: no mapping; write lines like account: PROJECT")
    rules = found.pop("rules", None) or {}
    if not isinstance(rules, dict):
        raise UserError(f"{path}: rules: no mapping of rule names to values")
    for where, values in [("", found), *((f"rules: {name}: ", rules[name]) for name in rules)]:
        if not isinstance(values, dict):
            raise UserError(f"{path}: {where}{values!r}: no mapping of names to values")
        for name, value in values.items():
            if name not in known:
                raise UserError(
                    f"{path}: {where}{name}: unknown; known are {', '.join(known)}, rules"
                )
            if not isinstance(value, str | int):
                raise UserError(f"{path}: {where}{name}: {value!r}: must be a text")
    texts = {name: str(value) for name, value in found.items()}
    return UserFile(
        path, texts, {rule: {k: str(v) for k, v in rules[rule].items()} for rule in rules}
    )


@dataclass(frozen=True)
class Request:
    """What one job asks for."""

    arguments: tuple[str, ...]  # of qsub, but for those that the submission adds
    queue: str  # empty: the server's default one
    seconds: int | None = None  # of walltime; None: the queue's default


def personal_value(
    name: str, resource: str, rule: str, resources: Mapping[str, Any], user: UserFile
) -> str:
    """A value that differs from person to person: a job's own resource, or of the user's file.

    Args:
        name: in the user's file.
        resource: what it is called among resources.
        rule: name of the rule or group.
        resources: of the job.
        user: what the person has written down.
    """
    value = resources.get(resource)
    if value is None or value == "":
        value = user.value(rule, name)
    return str(value or "")


def build_request(rule: str, threads: int, resources: Mapping[str, Any], user: UserFile) -> Request:
    """Turn resources into options of qsub.

    Args:
        rule: name of the rule or group.
        threads: cores a node, where the resource ncpus is not given.
        resources: Snakemake's, of the job.
        user: what the person has written down.

    Raises:
        UserError: a value cannot be.
    """

    def personal(name: str) -> str:
        return personal_value(name, name, rule, resources, user)

    queue = personal("queue")
    arguments = []
    if queue:
        arguments += ["-q", queue]
    if account := personal("account"):
        arguments += ["-A", account]
    arguments += ["-l", f"select={_select(rule, threads, resources, personal('select'))}"]
    if place := personal("place"):
        arguments += ["-l", f"place={place}"]
    seconds = None
    if (minutes := resources.get("runtime")) is not None:
        seconds = walltime(rule, minutes)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        arguments += ["-l", f"walltime={clock}"]
    if filesystems := personal("filesystems"):
        arguments += ["-l", f"filesystems={filesystems}"]
    return Request((*arguments, *_extra(rule, personal("pbs_extra"))), queue, seconds)


def walltime(rule: str, minutes: Any) -> int:
    """Minutes as whole seconds.

    Raises:
        UserError: they are no positive number.
    """
    try:
        seconds = round(float(minutes) * 60)
    except (TypeError, ValueError):
        seconds = 0
    if seconds <= 0:
        raise UserError(f"rule {rule}: runtime: {minutes!r}: no positive number of minutes")
    return seconds


def job_name(rule: str, wildcards: Mapping[str, str], token: str) -> str:
    """Name of a submission in PBS: readable, and its own."""
    words = "-".join(filter(None, (rule, *map(str, wildcards.values()))))
    clean = re.sub(r"[^A-Za-z0-9_.-]+", "_", words)
    start = clean if clean[:1].isalpha() else f"j{clean}"
    return f"{start[: NAME_LENGTH - len(token) - 1]}.{token}"


def _select(rule: str, threads: int, resources: Mapping[str, Any], template: str) -> str:
    values = {
        "nodes": resources.get("nodes", 1),
        "ncpus": resources.get("ncpus", threads),
        "ngpus": resources.get("ngpus", 0),
        "mem_mb": resources.get("mem_mb", 0),
    }
    for name, value in values.items():
        lowest = 1 if name in ("nodes", "ncpus") else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise UserError(f"rule {rule}: {name}: {value!r}: no whole number from {lowest}")
    if template:
        try:
            unknown = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
            if not unknown - set(values):
                return template.format(**values)
        except ValueError:
            pass
        raise UserError(
            f"rule {rule}: select: {template!r}: cannot be filled in; known are "
            f"{', '.join(f'{{{name}}}' for name in values)}"
        )
    parts = [f"{values['nodes']}", f"ncpus={values['ncpus']}"]
    if values["ngpus"]:
        parts.append(f"ngpus={values['ngpus']}")
    if values["mem_mb"]:
        parts.append(f"mem={values['mem_mb']}mb")
    return ":".join(parts)


def _extra(rule: str, text: str) -> list[str]:
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise UserError(f"rule {rule}: pbs_extra: {text!r}: {error}") from None
    for argument in arguments:
        if argument[:2] in OWN_OPTIONS:
            raise UserError(
                f"rule {rule}: pbs_extra: {argument}: the executor sets this itself; leave it out"
            )
    return arguments


def required_names(text: str, known: tuple[str, ...] = PERSONAL) -> tuple[str, ...]:
    """Read `account queue filesystems`: what the site insists on.

    Raises:
        UserError: one of them is unknown.
    """
    names = tuple(text.replace(",", " ").split())
    for name in names:
        if name not in known:
            raise UserError(f"required: {name!r}: unknown; known are {', '.join(known)}")
    return names


def misspelt_rules(user: UserFile, known: Collection[str]) -> list[str]:
    """What to tell of rules in the user's file that look like others of the workflow, misspelt.

    The file may be for other workflows, too, so that any other name is none of our business.
    """
    close = {name: get_close_matches(name, known, n=1) for name in user.rules if name not in known}
    return [
        f"{user.path}: rules: {name}: no rule or group is called so; did you mean {found[0]}?"
        for name, found in close.items()
        if found
    ]


def queue_limits(text: str) -> dict[str, int]:
    """Read `debug=1 prod=20 *=50`: queue to the jobs that may wait in it; * is any other queue.

    Raises:
        UserError: it is written otherwise.
    """
    limits = {}
    for part in text.replace(",", " ").split():
        name, equals, number = part.rpartition("=")
        if not number.isdigit() or int(number) < 1 or bool(equals) != bool(name):
            raise UserError(f"max-queued: {part!r}: write QUEUE=N, *=N or N, N from 1")
        limits[name or "*"] = int(number)
    return limits
