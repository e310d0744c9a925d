"""Checks of the batch system: its commands, its answer, limits of queues, the account.

The server is asked once. What it does not tell is "not known", never guessed.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from getpass import getuser
from typing import Any

from tokamake.batch_systems import seconds_of
from tokamake.doctor.profile import Profile, Request
from tokamake.doctor.programs import ask
from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.runtime.console import counted

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
    """A queue or partition, as far as the scheduler tells of it."""

    name: str
    open: bool = True
    """Whether it takes jobs."""
    runs: bool = True
    """Whether it starts them."""
    default: bool = False
    """Whether it is taken where none is named."""
    max_nodes: float | None = None
    """Nodes that a job can have; None: not told, inf: any number."""
    min_nodes: float | None = None
    max_minutes: float | None = None
    min_minutes: float | None = None
    allowed: tuple[str, ...] | None = None
    """Accounts that may use it; None: all, or not told."""
    denied: tuple[str, ...] = ()
    """Accounts that may not."""
    leads_to: tuple[str, ...] = ()
    """Queues that it hands jobs over to."""


def check_scheduler(profile: Profile, seconds: float = SECONDS) -> list[Result]:
    """All of the scheduler that a profile uses; nothing where jobs are local processes."""
    kind = profile.scheduler
    if not profile.cluster:
        return []
    if kind not in _COMMANDS:
        remedy = "see to it yourself; pbs and slurm are known here"
        return [warning("scheduler", f"not known: executor {kind}", remedy)]
    missing = [name for name in _COMMANDS[kind] if not shutil.which(name)]
    if missing:
        remedy = "run on a login node of the cluster, with its modules loaded"
        return [wrong("scheduler", f"no {', '.join(missing)} found", remedy)]
    answer = ask(_QUEUES[kind], seconds=seconds)
    read = pbs_queues if kind == "pbs" else slurm_partitions
    queues = {} if answer.fault else read(answer.output)
    if not queues:
        told = answer.fault or "an answer that names no queue"
        remedy = "wait until the server is back, or ask your site"
        return [wrong("scheduler", f"{_QUEUES[kind][0]}: {told}", remedy)]
    found = f"{_QUEUES[kind][0]} answers, {counted(len(queues), 'queue')}"
    return [
        ok("scheduler", found),
        _account(profile, queues),
        *judge_requests(profile.requests, queues),
    ]


def pbs_queues(text: str) -> dict[str, Queue]:
    """Queues of a reply of `qstat -Q -f -F json`; none where it is no such reply."""
    try:
        found = json.loads(text).get("Queue", {})
    except (ValueError, AttributeError):
        return {}
    return {name: _pbs_queue(name, told) for name, told in found.items() if isinstance(told, dict)}


def _pbs_queue(name: str, told: Mapping[str, Any]) -> Queue:
    most, least = told.get("resources_max", {}), told.get("resources_min", {})
    return Queue(
        name,
        open=str(told.get("enabled", "True")) == "True",
        runs=str(told.get("started", "True")) == "True",
        max_nodes=_number(most.get("nodect")),
        min_nodes=_number(least.get("nodect")),
        max_minutes=minutes(most.get("walltime")),
        min_minutes=minutes(least.get("walltime")),
        leads_to=tuple(
            one.strip().partition("@")[0]
            for one in str(told.get("route_destinations", "")).split(",")
            if one.strip()
        ),
    )


def slurm_partitions(text: str) -> dict[str, Queue]:
    """Partitions of the lines of `scontrol show partition --oneliner`."""
    found = {}
    for line in text.splitlines():
        told = dict(re.findall(r"(\w+)=(\S*)", line))
        if name := told.get("PartitionName"):
            found[name] = Queue(
                name,
                open=told.get("State", "UP") in ("UP", "DOWN"),
                runs=told.get("State", "UP") == "UP",
                default=told.get("Default") == "YES",
                max_nodes=_number(told.get("MaxNodes")),
                min_nodes=_number(told.get("MinNodes")),
                max_minutes=minutes(told.get("MaxTime")),
                allowed=_names(told.get("AllowAccounts", "ALL")),
                denied=_names(told.get("DenyAccounts", "ALL")) or (),
            )
    return found


def _names(text: str) -> tuple[str, ...] | None:
    return None if text in ("ALL", "(null)") else tuple(text.split(","))


def _number(value: Any) -> float | None:
    if value is None:
        return None
    text = str(value)
    return float("inf") if text in _UNLIMITED else float(text) if text.isdigit() else None


def minutes(text: Any) -> float | None:
    """A time, 01:00:00 or 2-00:00:00, inf for an unlimited one, None for what is no time."""
    if str(text) in _UNLIMITED:
        return float("inf")
    seconds = seconds_of(str(text))
    return None if seconds is None else seconds / 60


def _account(profile: Profile, queues: Mapping[str, Queue]) -> Result:
    """Whether the scheduler takes the account, where it tells."""
    name = "account is valid"
    account = profile.personal("account", "train")
    if profile.scheduler != "slurm" or not account:
        return ok(name, "not known: the scheduler tells at submission alone")
    partition = profile.personal("partition", "train")
    if fault := judge_partition_account(account, partition, queues):
        return fault
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "associations"]
    answer = ask([*command, f"user={getuser()}", "format=account"], seconds=SECONDS)
    mine = sorted(set(answer.output.split()))
    if answer.fault or not mine:
        return ok(name, f"not known: sacctmgr: {answer.fault or 'names no account of yours'}")
    if account.lower() not in map(str.lower, mine):
        return wrong(name, f"{account}: none of yours", f"yours are {', '.join(mine)}")
    return ok(name, account)


def judge_partition_account(
    account: str, partition: str, queues: Mapping[str, Queue]
) -> Result | None:
    """What is wrong where a partition does not take an account."""
    queue = queues.get(partition)
    if queue is None:
        return None
    named = account.lower()  # Slurm's accounts have no capital letters
    shut_out = queue.allowed is not None and named not in map(str.lower, queue.allowed)
    if not shut_out and named not in map(str.lower, queue.denied):
        return None
    taken = f"it takes {', '.join(queue.allowed)}" if queue.allowed else "name another"
    return wrong("account is valid", f"{account}: not taken by partition {partition}", taken)


def judge_requests(requests: Iterable[Request], queues: Mapping[str, Queue]) -> list[Result]:
    """What rules ask for against the limits of their queues; the same request once."""
    results, seen = [], set()
    for request in requests:
        alike = (request.queue, request.nodes, request.minutes)
        if alike not in seen:
            seen.add(alike)
            results.append(judge_request(request, queues))
    return results


def judge_request(request: Request, queues: Mapping[str, Queue]) -> Result:
    """What one rule asks for."""
    name = f"limits for {request.rule or 'other rules'}"
    time = "time not known" if request.minutes is None else f"{request.minutes:g} min"
    asked = f"{counted(request.nodes, 'node')}, {time}"
    default = next((queue for queue in queues.values() if queue.default), None)
    queue = queues.get(request.queue) if request.queue else default
    if queue is None and not request.queue:
        return ok(name, f"{asked}; not known: no queue is named, and no default one told")
    if queue is None:
        there = ", ".join(sorted(queues))
        return wrong(name, f"{request.queue}: no such queue", f"there are {there}")
    if not queue.open:
        return wrong(name, f"{queue.name}: takes no jobs now", "name another queue")
    reached = [queues[one] for one in queue.leads_to if one in queues]
    faults = faults_of(request, queue)
    ways = [faults_of(request, one) for one in reached]
    if not faults and ways and all(ways):
        faults = min(ways, key=len)
    if faults:
        where = f"set-resources {request.rule}" if request.rule else "default-resources"
        remedy = f"change {where} or the queue"
        return wrong(name, f"{asked} in {queue.name}, {'; '.join(faults)}", remedy)
    if not queue.runs:
        return warning(name, f"{queue.name}: starts no jobs now", "they wait until it does")
    return ok(name, f"{asked} in {queue.name}; {_limits([queue, *reached])}")


def faults_of(request: Request, queue: Queue) -> list[str]:
    """In which ways a request is outside a queue's limits."""
    faults = []
    for asked, least, most, unit in (
        (request.nodes, queue.min_nodes, queue.max_nodes, "nodes"),
        (request.minutes, queue.min_minutes, queue.max_minutes, "min"),
    ):
        if asked is None:
            continue
        if most is not None and asked > most:
            faults.append(f"which has at most {most:g} {unit}")
        if least is not None and asked < least:
            faults.append(f"which has at least {least:g} {unit}")
    return faults


def _limits(queues: Sequence[Queue]) -> str:
    told = []
    for values, unit in (
        ([queue.max_nodes for queue in queues], "nodes"),
        ([queue.max_minutes for queue in queues], "min"),
    ):
        known = [value for value in values if value is not None]
        told.append(f"at most {max(known):g} {unit}" if known else f"{unit}: limit not known")
    return ", ".join(told).replace("at most inf", "any number of")
