"""Checks of the batch system: commands, server, limits of queues, account.

doctor queries the server once. Values that the server does not report are "not known".
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from getpass import getuser
from typing import Any

from tokamake.doctor.profile import Profile, ResourceRequest
from tokamake.doctor.programs import ask
from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.runtime.console import counted
from tokamake.scheduler_formats import seconds_of

SECONDS = 20.0

_COMMANDS = {
    "pbs": ("qsub", "qstat", "qselect", "qdel"),
    "slurm": ("sbatch", "squeue", "scancel", "srun", "scontrol"),
}
_QUEUES = {
    "pbs": ("qstat", "-Q", "-f", "-F", "json"),
    "slurm": ("scontrol", "show", "partition", "--oneliner"),
}
_UNLIMITED = ("UNLIMITED", "INFINITE")


@dataclass(frozen=True)
class Queue:
    """A queue or partition, as the scheduler reports it."""

    name: str
    open: bool = True
    """Whether it accepts jobs."""
    runs: bool = True
    """Whether it starts jobs."""
    default: bool = False
    """Whether it gets jobs without a queue."""
    max_nodes: float | None = None
    """Maximum nodes of a job; None: not reported, inf: unlimited."""
    min_nodes: float | None = None
    max_minutes: float | None = None
    min_minutes: float | None = None
    allowed: tuple[str, ...] | None = None
    """Accounts that may use it; None: all, or not reported."""
    denied: tuple[str, ...] = ()
    """Accounts that may not use it."""
    leads_to: tuple[str, ...] = ()
    """Destinations of a routing queue."""


def check_scheduler(profile: Profile, seconds: float = SECONDS) -> list[Result]:
    """Check the scheduler of a profile; no results if jobs are local processes."""
    kind = profile.scheduler
    if not profile.cluster:
        return []
    if kind not in _COMMANDS:
        remedy = "check it yourself; doctor supports pbs and slurm"
        return [warning("scheduler", f"not known: executor {kind}", remedy)]
    missing = [name for name in _COMMANDS[kind] if not shutil.which(name)]
    if missing:
        remedy = "run on a login node of the cluster, with its modules loaded"
        return [wrong("scheduler", f"no {', '.join(missing)} found", remedy)]
    answer = ask(_QUEUES[kind], seconds=seconds)
    parse = pbs_queues if kind == "pbs" else slurm_partitions
    queues = {} if answer.fault else parse(answer.output)
    if not queues:
        fault = answer.fault or "the answer contains no queue"
        remedy = "wait until the server responds, or ask your site"
        return [wrong("scheduler", f"{_QUEUES[kind][0]}: {fault}", remedy)]
    value = f"{_QUEUES[kind][0]} answers, {counted(len(queues), 'queue')}"
    return [
        ok("scheduler", value),
        _account(profile, queues),
        *request_results(profile.requests, queues),
    ]


def pbs_queues(text: str) -> dict[str, Queue]:
    """Parse the output of `qstat -Q -f -F json`; empty if it is not valid."""
    try:
        queues = json.loads(text).get("Queue", {})
    except (ValueError, AttributeError):
        return {}
    return {name: _pbs_queue(name, q) for name, q in queues.items() if isinstance(q, dict)}


def _pbs_queue(name: str, attributes: Mapping[str, Any]) -> Queue:
    maximum, minimum = attributes.get("resources_max", {}), attributes.get("resources_min", {})
    return Queue(
        name,
        open=str(attributes.get("enabled", "True")) == "True",
        runs=str(attributes.get("started", "True")) == "True",
        max_nodes=_number(maximum.get("nodect")),
        min_nodes=_number(minimum.get("nodect")),
        max_minutes=minutes(maximum.get("walltime")),
        min_minutes=minutes(minimum.get("walltime")),
        leads_to=tuple(
            destination.strip().partition("@")[0]
            for destination in str(attributes.get("route_destinations", "")).split(",")
            if destination.strip()
        ),
    )


def slurm_partitions(text: str) -> dict[str, Queue]:
    """Parse the lines of `scontrol show partition --oneliner`."""
    partitions = {}
    for line in text.splitlines():
        attributes = dict(re.findall(r"(\w+)=(\S*)", line))
        if name := attributes.get("PartitionName"):
            partitions[name] = Queue(
                name,
                open=attributes.get("State", "UP") in ("UP", "DOWN"),
                runs=attributes.get("State", "UP") == "UP",
                default=attributes.get("Default") == "YES",
                max_nodes=_number(attributes.get("MaxNodes")),
                min_nodes=_number(attributes.get("MinNodes")),
                max_minutes=minutes(attributes.get("MaxTime")),
                allowed=_names(attributes.get("AllowAccounts", "ALL")),
                denied=_names(attributes.get("DenyAccounts", "ALL")) or (),
            )
    return partitions


def _names(text: str) -> tuple[str, ...] | None:
    return None if text in ("ALL", "(null)") else tuple(text.split(","))


def _number(value: Any) -> float | None:
    if value is None:
        return None
    text = str(value)
    return float("inf") if text in _UNLIMITED else float(text) if text.isdigit() else None


def minutes(text: Any) -> float | None:
    """Parse a time such as 01:00:00 or 2-00:00:00; inf if unlimited, None if it is not a time."""
    if str(text) in _UNLIMITED:
        return float("inf")
    seconds = seconds_of(str(text))
    return None if seconds is None else seconds / 60


def _account(profile: Profile, queues: Mapping[str, Queue]) -> Result:
    """Check that the scheduler accepts the account, if the scheduler can report this."""
    name = "account is valid"
    account = profile.personal("account", "train")
    if profile.scheduler != "slurm" or not account:
        return ok(name, "not known: the scheduler checks it only at submission")
    partition = profile.personal("partition", "train")
    if fault := partition_account_fault(account, partition, queues=queues):
        return fault
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "associations"]
    answer = ask([*command, f"user={getuser()}", "format=account"], seconds=SECONDS)
    accounts = sorted(set(answer.output.split()))
    if answer.fault or not accounts:
        return ok(name, f"not known: sacctmgr: {answer.fault or 'lists no account of yours'}")
    if account.lower() not in map(str.lower, accounts):
        return wrong(name, f"{account}: not your account", f"yours are {', '.join(accounts)}")
    return ok(name, account)


def partition_account_fault(
    account: str, partition: str, *, queues: Mapping[str, Queue]
) -> Result | None:
    """Return the fault if a partition does not accept an account."""
    queue = queues.get(partition)
    if queue is None:
        return None
    name = account.lower()  # Slurm ignores the case of accounts.
    not_allowed = queue.allowed is not None and name not in map(str.lower, queue.allowed)
    if not not_allowed and name not in map(str.lower, queue.denied):
        return None
    remedy = f"it accepts {', '.join(queue.allowed)}" if queue.allowed else "use another account"
    value = f"{account}: partition {partition} does not accept it"
    return wrong("account is valid", value, remedy)


def request_results(
    requests: Iterable[ResourceRequest], queues: Mapping[str, Queue]
) -> list[Result]:
    """Compare requests of rules with the limits of their queues; report equal requests once."""
    first: dict[tuple[object, ...], ResourceRequest] = {}
    for request in requests:
        first.setdefault((request.queue, request.nodes, request.minutes), request)
    return [request_result(request, queues) for request in first.values()]


def request_result(request: ResourceRequest, queues: Mapping[str, Queue]) -> Result:
    """Compare the request of a rule with the limits of its queue."""
    name = f"limits for {request.rule or 'other rules'}"
    time = "time not known" if request.minutes is None else f"{request.minutes:g} min"
    requested = f"{counted(request.nodes, 'node')}, {time}"
    default = next((queue for queue in queues.values() if queue.default), None)
    queue = queues.get(request.queue) if request.queue else default
    if queue is None and not request.queue:
        return ok(
            name, f"{requested}; not known: no queue is set, and the scheduler reports no default"
        )
    if queue is None:
        names = ", ".join(sorted(queues))
        return wrong(name, f"{request.queue}: no such queue", f"queues are {names}")
    if not queue.open:
        return wrong(name, f"{queue.name}: accepts no jobs now", "use another queue")
    destinations = [queues[name] for name in queue.leads_to if name in queues]
    faults = faults_of(request, queue)
    # A routing queue fails only if no destination accepts the job.
    destination_faults = [faults_of(request, destination) for destination in destinations]
    if not faults and destination_faults and all(destination_faults):
        faults = min(destination_faults, key=len)
    if faults:
        where = f"set-resources {request.rule}" if request.rule else "default-resources"
        remedy = f"change {where} or the queue"
        return wrong(name, f"{requested} in {queue.name}, {'; '.join(faults)}", remedy)
    if not queue.runs:
        return warning(name, f"{queue.name}: starts no jobs now", "jobs wait until it does")
    return ok(name, f"{requested} in {queue.name}; {_limits([queue, *destinations])}")


def faults_of(request: ResourceRequest, queue: Queue) -> list[str]:
    """Return the limits of a queue that a request violates."""
    faults = []
    for value, minimum, maximum, unit in (
        (request.nodes, queue.min_nodes, queue.max_nodes, "nodes"),
        (request.minutes, queue.min_minutes, queue.max_minutes, "min"),
    ):
        if value is None:
            continue
        if maximum is not None and value > maximum:
            faults.append(f"which allows at most {maximum:g} {unit}")
        if minimum is not None and value < minimum:
            faults.append(f"which requires at least {minimum:g} {unit}")
    return faults


def _limits(queues: Sequence[Queue]) -> str:
    limits = []
    for values, unit in (
        ([queue.max_nodes for queue in queues], "nodes"),
        ([queue.max_minutes for queue in queues], "min"),
    ):
        known = [value for value in values if value is not None]
        limits.append(f"at most {max(known):g} {unit}" if known else f"{unit}: limit not known")
    return ", ".join(limits).replace("at most inf", "any number of")
