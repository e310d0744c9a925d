"""What Slurm says of a job, as a table: state, reason and exit code become a reading.

States and reasons are those of squeue's manual; seen on Slurm 22.05.
"""

from collections.abc import Mapping
from typing import Any

from snakemake_executor_plugin_pbs.states import Kind, Reading

STATES = {
    "PENDING": (Kind.WAITING, "queued"),
    "REQUEUED": (Kind.WAITING, "queued again by Slurm"),
    "REQUEUE_FED": (Kind.WAITING, "queued again by Slurm"),
    "REQUEUE_HOLD": (Kind.HELD, "held"),
    "RESV_DEL_HOLD": (Kind.HELD, "held, for its reservation was deleted"),
    "SPECIAL_EXIT": (Kind.HELD, "held after a special exit"),
    "CONFIGURING": (Kind.RUNNING, "waiting for its nodes to boot"),
    "RUNNING": (Kind.RUNNING, "running"),
    "SUSPENDED": (Kind.RUNNING, "suspended"),
    "STOPPED": (Kind.RUNNING, "stopped"),
    "RESIZING": (Kind.RUNNING, "changing its size"),
    "SIGNALING": (Kind.RUNNING, "being signalled"),
    "STAGE_OUT": (Kind.RUNNING, "staging files out"),
    "COMPLETING": (Kind.RUNNING, "ending"),
    "COMPLETED": (Kind.SUCCEEDED, "finished"),
    "FAILED": (Kind.FAILED, "failed"),
    "CANCELLED": (Kind.DELETED, "was cancelled"),
    "TIMEOUT": (
        Kind.FAILED, "used more than was asked for and was killed by Slurm: time; raise runtime",
    ),
    "OUT_OF_MEMORY": (
        Kind.FAILED, "used more than was asked for and was killed by Slurm: memory; raise mem_mb",
    ),
    "NODE_FAIL": (Kind.FAILED, "was lost with its node"),
    "BOOT_FAIL": (Kind.FAILED, "could not be started by Slurm: its nodes did not boot"),
    "DEADLINE": (Kind.FAILED, "could not end before its deadline"),
    "PREEMPTED": (Kind.FAILED, "had to make room for another job (preempted)"),
    "REVOKED": (Kind.FAILED, "was revoked, for another cluster runs it"),
}  # fmt: skip

# Reasons of a waiting job for which it waits until somebody changes it.
HELD = {"JobHeldUser": "by a user", "JobHeldAdmin": "by an administrator"}
# Reasons for which it waits for ever.
NEVER = {
    "PartitionTimeLimit": "the partition allows no such time; lower runtime",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
}
# Reasons that are a mistake, or pass: nodes come back, and so does the accounting database.
DOUBTFUL = {
    "PartitionNodeLimit": "the partition has no room for so many nodes, or they are down",
    "BadConstraints": "no nodes have what it asks for, or they are down",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the QOS is not valid",
    "AccountNotAllowed": "the partition does not take this account",
    "QOSNotAllowed": "the partition or account does not take this QOS",
}


def read(job: Mapping[str, Any]) -> Reading | None:
    """Put what squeue says of a job into words; None where it says too little to go by.

    Args:
        job: `state`, `reason` and `exit_code` (a wait status) as squeue prints them.
    """
    state, reason = str(job.get("state", "")), str(job.get("reason", ""))
    if state not in STATES:
        return None
    kind, message = STATES[state]
    if kind is Kind.WAITING and reason in NEVER:
        return Reading(Kind.NEVER, f"can never run: {NEVER[reason]} ({reason})")
    if kind is Kind.WAITING and reason in DOUBTFUL:
        return Reading(Kind.HELD, f"waiting: {DOUBTFUL[reason]} ({reason})")
    if kind is Kind.WAITING and reason in HELD:
        return Reading(Kind.HELD, f"held {HELD[reason]}")
    if kind is Kind.WAITING and "held" in reason.lower():
        return Reading(Kind.HELD, f"held ({reason})")
    if state == "FAILED":
        return Reading(kind, _exit_message(str(job.get("exit_code", ""))))
    return Reading(kind, message)


def _exit_message(code: str) -> str:
    number = int(code) if code.isdigit() else 0
    if number & 127:
        return f"was killed by signal {number & 127}"
    return f"failed with exit status {number >> 8}" if number else "failed"
