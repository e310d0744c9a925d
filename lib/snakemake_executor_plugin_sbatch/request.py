"""Options of sbatch, from a job's resources and the user file."""

import re
from collections.abc import Mapping
from typing import Any

from snakemake_executor_plugin_pbs.base.errors import UserError
from snakemake_executor_plugin_pbs.base.request import (
    SubmitRequest,
    extra_options,
    num_spare_nodes,
    whole_number,
)
from snakemake_executor_plugin_pbs.base.user_file import UserFile, personal_value

# Values of a user: the user file may set them for all rules, and for each rule.
_OPTIONS = ("account", "partition", "qos", "constraint", "reservation")  # have the name of sbatch
PERSONAL = (*_OPTIONS, "gpus_per_node", "container", "slurm_extra")
# Resources with other names, as in snakemake-executor-plugin-slurm.
RESOURCES = {"account": "slurm_account", "partition": "slurm_partition"}
_CONFLICTS = {
    "mem_mb": ("mem_mb_per_cpu",),
    "gpu": ("gpus_per_node", "gres"),
    "spare_nodes": ("tasks_per_node",),
}
"""Resources that say the same in two ways."""
# Options that the executor sets itself.
OWN_OPTIONS = (
    "-J", "--job-name", "-o", "--output", "-e", "--error", "--parsable", "-W", "--wait",
    "-a", "--array", "--wrap", "-H", "--hold", "-D", "--chdir",
)  # fmt: skip


def read_defaults(text: str) -> dict[str, str]:
    """Parse values of the site, such as `constraint=gpu qos=regular`."""
    defaults = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if name not in PERSONAL or not value:
            raise UserError(
                f"--sbatch-defaults: {part!r}: write NAME=VALUE; names are {', '.join(PERSONAL)}"
            )
        defaults[name] = value
    return defaults


def build_request(
    rule: str, threads: int, resources: Mapping[str, Any], user: UserFile
) -> SubmitRequest:
    """Convert resources into options of sbatch; `threads`: cores per task without cpus_per_task."""

    def personal(name: str) -> str:
        return personal_value(
            name, RESOURCES.get(name, name), rule=rule, resources=resources, user=user
        )

    def number(name: str, default: int) -> int:
        return whole_number(rule, name, value=resources.get(name, default))

    _refuse_conflicts(rule, resources)
    nodes = number("nodes", 1)
    per_node = number("tasks_per_node", 1) if resources.get("tasks_per_node") else 1
    arguments = [
        *_nodes(nodes, number("tasks", per_node * nodes), spare=num_spare_nodes(rule, resources)),
        f"--cpus-per-task={number('cpus_per_task', threads)}",
    ]
    # Without --mem, Slurm decides; whole nodes have all their memory.
    if resources.get("mem_mb"):
        arguments.append(f"--mem={number('mem_mb', 1)}")
    if resources.get("mem_mb_per_cpu"):
        arguments.append(f"--mem-per-cpu={number('mem_mb_per_cpu', 1)}")
    if resources.get("tasks_per_node"):
        if (tasks := number("tasks", per_node * nodes)) > per_node * nodes:
            raise UserError(
                f"rule {rule}: tasks: {tasks}: more than {nodes} nodes with tasks_per_node "
                f"{per_node} have; change one of them"
            )
        arguments.append(f"--ntasks-per-node={per_node}")
    if resources.get("gpu"):
        model = resources.get("gpu_model")
        arguments.append(f"--gpus={f'{model}:' if model else ''}{number('gpu', 1)}")
    if resources.get("runtime") is not None:
        arguments.append(f"--time={number('runtime', 1)}")
    for name in ("gres", "signal"):
        if value := resources.get(name):
            arguments.append(f"--{name}={value}")
    # The user's GPUs are for jobs that start ranks; `gpu` and `gres` come first.
    # `in` would look for a value: resources of a job are a list with names.
    has_own = resources.get("gpu") or resources.get("gres")
    of_user = resources.get("tasks") is not None and not has_own
    if gpus := personal("gpus_per_node") if of_user else resources.get("gpus_per_node"):
        arguments.append(f"--gpus-per-node={gpus}")
    for name in _OPTIONS:
        if value := personal(name):
            arguments.append(f"--{name}={value}")
    extra = extra_options(
        rule, "slurm_extra", text=personal("slurm_extra"), is_own_option=_is_own_option
    )
    queue, container = personal("partition"), personal("container")
    return SubmitRequest((*arguments, *extra), queue, container=container)


def _refuse_conflicts(rule: str, resources: Mapping[str, Any]) -> None:
    if clusters := resources.get("clusters") or resources.get("cluster"):
        raise UserError(
            f"rule {rule}: clusters: {clusters!r}: jobs on other clusters are not followed; start "
            "Snakemake on a login node of that cluster"
        )
    if resources.get("gpu_model") and not resources.get("gpu"):
        raise UserError(
            f"rule {rule}: gpu_model: {resources['gpu_model']!r}: without gpu; set gpu to the "
            "number of GPUs, or name the model in gres"
        )
    for name, others in _CONFLICTS.items():
        for other in others if resources.get(name) else ():
            if resources.get(other):
                raise UserError(
                    f"rule {rule}: {name}: {resources[name]!r}: with {other} {resources[other]!r}; "
                    "remove one of them, or set it to 0"
                )


def _nodes(nodes: int, tasks: int, *, spare: int) -> list[str]:
    """Options for nodes and tasks; with spare nodes, each node has room for its share of tasks."""
    if not spare:
        return [f"--nodes={nodes}", f"--ntasks={tasks}"]
    share = -(-tasks // nodes)
    return [
        f"--nodes={nodes + spare}",
        f"--ntasks={share * (nodes + spare)}",
        f"--ntasks-per-node={share}",
        "--no-kill",  # the job continues without a lost node
    ]


def _is_own_option(argument: str) -> bool:
    name = argument.partition("=")[0]
    return name in OWN_OPTIONS or re.match(r"-[JoeWaHD]\S", argument) is not None
