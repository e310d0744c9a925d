"""Status of a Slurm job as a table: state, reason and exit code give a state and a message.

States and reasons are from the manual of squeue, tested on Slurm 22.05.
"""

import re
from collections.abc import Mapping
from typing import Any

from snakemake_executor_plugin_pbs.base.states import JobState, JobStatus

KILLED = "used more than it requested and was killed by Slurm: "
STATES = {
    "PENDING": (JobState.WAITING, "queued"),
    "REQUEUED": (JobState.WAITING, "requeued by Slurm"),
    "REQUEUE_FED": (JobState.WAITING, "requeued by Slurm"),
    "REQUEUE_HOLD": (JobState.HELD, "held"),
    "RESV_DEL_HOLD": (JobState.HELD, "held because its reservation was deleted"),
    "SPECIAL_EXIT": (JobState.HELD, "held after a special exit"),
    "CONFIGURING": (JobState.RUNNING, "waiting for its nodes to boot"),
    "RUNNING": (JobState.RUNNING, "running"),
    "SUSPENDED": (JobState.RUNNING, "suspended"),
    "STOPPED": (JobState.RUNNING, "stopped"),
    "RESIZING": (JobState.RUNNING, "being resized"),
    "SIGNALING": (JobState.RUNNING, "being signalled"),
    "STAGE_OUT": (JobState.RUNNING, "staging files out"),
    "COMPLETING": (JobState.RUNNING, "ending"),
    "COMPLETED": (JobState.SUCCEEDED, "finished"),
    "FAILED": (JobState.FAILED, "failed"),
    "CANCELLED": (JobState.DELETED, "was cancelled"),
    "TIMEOUT": (JobState.FAILED, f"{KILLED}time; raise runtime"),
    "OUT_OF_MEMORY": (JobState.FAILED, f"{KILLED}memory; raise mem_mb"),
    "NODE_FAIL": (JobState.FAILED, "was lost with its node"),
    "BOOT_FAIL": (JobState.FAILED, "could not be started by Slurm: its nodes did not boot"),
    "DEADLINE": (JobState.FAILED, "did not end before its deadline"),
    "PREEMPTED": (JobState.FAILED, "was preempted by another job"),
    "REVOKED": (JobState.FAILED, "was revoked because another cluster runs it"),
}  # fmt: skip

# Reasons of a pending job that waits until a person releases it.
HELD = {"JobHeldUser": "by a user", "JobHeldAdmin": "by an administrator"}
# Reasons of a pending job that can never run.
NEVER = {
    "PartitionTimeLimit": "the time limit of the partition is lower; lower runtime",
    "DependencyNeverSatisfied": "a job that it depends on failed",
}
# Reasons that may be a mistake or pass: nodes and the accounting database can come back.
DOUBTFUL = {
    "PartitionNodeLimit": "the partition does not have as many nodes, or they are down",
    "BadConstraints": "no nodes have the features that it requests, or they are down",
    "InvalidAccount": "the account is invalid",
    "InvalidQOS": "the QOS is invalid",
    "AccountNotAllowed": "the partition does not allow this account",
    "QOSNotAllowed": "the partition or account does not allow this QOS",
}


def read(job: Mapping[str, Any]) -> JobStatus | None:
    """Status from fields of squeue; None: Slurm's state is unknown.

    `exit_code` is a wait status.
    """
    name, reason = str(job.get("state", "")), str(job.get("reason", ""))
    if name not in STATES:
        return None
    state, message = STATES[name]
    if state is JobState.WAITING and reason in NEVER:
        return JobStatus(JobState.NEVER, f"can never run: {NEVER[reason]} ({reason})")
    if state is JobState.WAITING and reason in DOUBTFUL:
        return JobStatus(JobState.HELD, f"waiting: {DOUBTFUL[reason]} ({reason})")
    if state is JobState.WAITING and reason in HELD:
        return JobStatus(JobState.HELD, f"held {HELD[reason]}")
    if state is JobState.WAITING and "held" in reason.lower():
        return JobStatus(JobState.HELD, f"held ({reason})")
    if name == "RUNNING" and _has_lost_its_script(job):
        return JobStatus(JobState.NEVER, "lost the node of its script; Slurm would keep the rest")
    if name == "FAILED":
        return JobStatus(state, _exit_message(str(job.get("exit_code", ""))))
    return JobStatus(state, message)


def _has_lost_its_script(job: Mapping[str, Any]) -> bool:
    """Whether a job with --no-kill continues without the node on which its script ran.

    Slurm takes a lost node out of the job's list, and lets the job run until its time limit
    (job_mgr.c of Slurm, 22.05 to 26.05).
    """
    host, nodes = job.get("batch_host", ""), job.get("nodes", "")
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return bool(host and parts) and not any(_is_in(host, part) for part in parts)


def _is_in(host: str, part: str) -> bool:
    """Whether a host is in a part of a node list, such as `n[03-05,7]-x`."""
    names, ranges = re.split(r"\[[^\]]*\]", part), re.findall(r"\[([^\]]*)\]", part)
    numbers = re.fullmatch(r"(\d+)".join(map(re.escape, names)), host)
    return numbers is not None and all(
        any(_is_within(number, bounds) for bounds in each.split(","))
        for number, each in zip(numbers.groups(), ranges, strict=True)
    )


def _is_within(number: str, bounds: str) -> bool:
    first, _, last = bounds.partition("-")
    is_written_so = number == f"{int(number):0{len(first)}}"
    return is_written_so and int(first) <= int(number) <= int(last or first)


def _exit_message(code: str) -> str:
    number = int(code) if code.isdigit() else 0
    if number & 127:
        return f"was killed by signal {number & 127}"
    return f"failed with exit status {number >> 8}" if number else "failed"
