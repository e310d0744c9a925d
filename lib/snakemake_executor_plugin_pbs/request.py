"""Options of qsub, from a job's resources and the user file."""

from collections.abc import Mapping
from string import Formatter
from typing import Any

from .base.errors import UserError
from .base.request import SubmitRequest, extra_options, num_spare_nodes, whole_number
from .base.user_file import UserFile, personal_value

# Values of a user: the user file may set them for all rules, and for each rule.
PERSONAL = ("account", "queue", "filesystems", "place", "select", "container", "pbs_extra")
# Options that the executor sets itself.
OWN_OPTIONS = ("-N", "-J", "-o", "-e", "-j", "-k", "-I", "-X", "-z", "-S", "-C")


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
