"""What to ask Slurm for: a job's resources, and the user's own file, as arguments of sbatch."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from snakemake_executor_plugin_pbs.errors import UserError
from snakemake_executor_plugin_pbs.request import Request, UserFile, personal_value

# What differs from person to person; the user's file may say it for all rules, and for each.
PERSONAL = ("account", "partition", "qos", "constraint", "reservation", "slurm_extra")
# As resources of a rule, these have the names that snakemake-executor-plugin-slurm gave them.
RESOURCES = {"account": "slurm_account", "partition": "slurm_partition"}
# Options that the executor itself depends on.
OWN_OPTIONS = (
    "-J", "--job-name", "-o", "--output", "-e", "--error", "--parsable", "-W", "--wait",
    "-a", "--array", "--wrap", "-H", "--hold", "-D", "--chdir",
)  # fmt: skip


def read_defaults(text: str) -> dict[str, str]:
    """Read `constraint=gpu qos=regular`.

    Raises:
        UserError: it is written otherwise.
    """
    found = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if name not in PERSONAL or not value:
            raise UserError(
                f"--sbatch-defaults: {part!r}: write NAME=VALUE; names are {', '.join(PERSONAL)}"
            )
        found[name] = value
    return found


def build_request(rule: str, threads: int, resources: Mapping[str, Any], user: UserFile) -> Request:
    """Turn resources into options of sbatch.

    Args:
        rule: name of the rule or group.
        threads: cores a task, where the resource cpus_per_task is not given.
        resources: Snakemake's, of the job.
        user: what the person has written down.

    Raises:
        UserError: a value cannot be.
    """

    def personal(name: str) -> str:
        return personal_value(name, RESOURCES.get(name, name), rule, resources, user)

    def number(name: str, default: int) -> int:
        value = resources.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"rule {rule}: {name}: {value!r}: no whole number from 1")
        return value

    arguments = [
        f"--nodes={number('nodes', 1)}",
        f"--ntasks={number('tasks', 1)}",
        f"--cpus-per-task={number('cpus_per_task', threads)}",
    ]
    # Whole nodes come with all their memory; 0 leaves it to Slurm.
    if resources.get("mem_mb"):
        arguments.append(f"--mem={number('mem_mb', 1)}")
    if resources.get("runtime") is not None:
        arguments.append(f"--time={number('runtime', 1)}")
    for name in ("gres", "gpus_per_node", "signal"):
        if value := resources.get(name):
            arguments.append(f"--{name.replace('_', '-')}={value}")
    for name in PERSONAL[:-1]:
        if value := personal(name):
            arguments.append(f"--{name}={value}")
    return Request((*arguments, *_extra(rule, personal("slurm_extra"))), personal("partition"))


def _extra(rule: str, text: str) -> list[str]:
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise UserError(f"rule {rule}: slurm_extra: {text!r}: {error}") from None
    for argument in arguments:
        if argument.partition("=")[0] in OWN_OPTIONS or re.match(r"-[JoeWaHD]\S", argument):
            raise UserError(
                f"rule {rule}: slurm_extra: {argument}: the executor sets this itself; leave it out"
            )
    return arguments
