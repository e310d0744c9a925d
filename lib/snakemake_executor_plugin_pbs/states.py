"""Status of a PBS job as a table: job_state, substate and Exit_status give a state and a message.

Measured on OpenPBS 23.06.06. Negative exit statuses are defined in its job.h.
"""

from collections.abc import Mapping
from typing import Any

from .base.states import JobState, JobStatus, exit_message

FINISHED, TERMINATED = 92, 91  # substates of state F; 93 is a failure


STATES = {
    "Q": (JobState.WAITING, "queued"),
    "T": (JobState.WAITING, "being moved to another queue"),
    "W": (JobState.WAITING, "waiting for its start time"),
    "M": (JobState.RUNNING, "moved to another server"),  # this server reports nothing more
    "H": (JobState.HELD, "held"),
    "R": (JobState.RUNNING, "running"),
    "B": (JobState.RUNNING, "array started"),
    "E": (JobState.RUNNING, "ending"),
    "S": (JobState.RUNNING, "suspended by the server"),
    "U": (JobState.RUNNING, "suspended because its host is in use"),
}

HOLDS = {
    "u": "by a user", "o": "by an operator", "s": "by the system", "p": "due to a bad password",
}  # fmt: skip

KILLED = "used more than it requested and was killed by PBS: "
NODE = "was lost with its node: "
NOT_STARTED = "could not be started by PBS: "
EXIT_STATUS = {
    -1: NOT_STARTED + "an error before its files were staged",
    -2: NOT_STARTED + "an error after its files were staged",
    -3: NOT_STARTED + "PBS should have tried again",
    -4: NODE + "the PBS daemon on it restarted",
    -5: NODE + "the PBS daemon on it restarted, and the job's checkpoint cannot be moved",
    -6: NODE + "the PBS daemon on it restarted, and the job's checkpoint can be moved",
    -7: NOT_STARTED + "the restart from its checkpoint failed",
    -10: NOT_STARTED + "the node does not know its user or group",
    -11: "should have been rerun by PBS",
    -12: "was checkpointed and killed",
    -13: NOT_STARTED + "a bad password",
    -14: NODE + "its first node lost contact with another node",
    -15: "should have been restarted from its checkpoint",
    -16: NOT_STARTED + "a hook of the site rejected it for now",
    -17: NOT_STARTED + "a hook of the site rejected it",
    -18: "should have been rerun, as a hook of the site requested",
    -19: "was deleted by a hook of the site",
    -20: NODE + "the server lost contact with its first node",
    -21: NOT_STARTED + "a security violation in the PBS folder",
    -22: NOT_STARTED + "a hook of the site failed or timed out",
    -23: NOT_STARTED + "no Kerberos credentials",
    -24: KILLED + "ncpus, in a short burst",
    -25: KILLED + "ncpus, on average",
    -26: KILLED + "vmem",
    -27: KILLED + "memory; raise mem_mb",
    -28: KILLED + "CPU time",
    -29: KILLED + "walltime; raise runtime",
    -30: NODE + "another node did not join the job",
    -31: KILLED + "huge pages",
    -32: NODE + "the PBS daemon on it no longer knew the job",
}


def read(job: Mapping[str, Any]) -> JobStatus | None:
    """Status from attributes of `qstat -x -f -F json`; None: they are incomplete."""
    letter = job.get("job_state")
    if letter == "F":
        return _ended(job)
    if letter not in STATES:
        return None
    state, message = STATES[letter]
    comment = str(job.get("comment", "")).strip()
    if letter == "Q" and comment.startswith("Can Never Run"):
        return JobStatus(JobState.NEVER, f"can never run: {comment.partition(': ')[2] or comment}")
    if state is JobState.HELD:
        holds = ", ".join(HOLDS[hold] for hold in str(job.get("Hold_Types", "")) if hold in HOLDS)
        words = (message, holds, comment and f"({comment})")
        return JobStatus(state, " ".join(filter(None, words)))
    return JobStatus(state, message)


def _ended(job: Mapping[str, Any]) -> JobStatus | None:
    """Status of a job in state F: success only if substate and exit status agree."""
    try:
        substate = int(job["substate"])
        exit_status = int(job["Exit_status"]) if "Exit_status" in job else None
    except (KeyError, ValueError, TypeError):
        return None
    if substate == FINISHED and exit_status == 0:
        return JobStatus(JobState.SUCCEEDED, "finished")
    if substate == TERMINATED:
        place = "running" if exit_status is not None else "in the queue"
        comment = job.get("comment", "")
        user = str(comment).rpartition(" terminated by ")[2] if " terminated by " in comment else ""
        return JobStatus(JobState.DELETED, f"was deleted while {place}{user and f' by {user}'}")
    if exit_status is None or exit_status == 0:
        return JobStatus(
            JobState.FAILED,
            f"ended for an unknown reason (substate {substate}, Exit_status {exit_status})",
        )
    return JobStatus(JobState.FAILED, _exit_message(exit_status))


def _exit_message(status: int) -> str:
    if status >= 0:
        return exit_message(status)
    return EXIT_STATUS.get(status, f"was ended by PBS with the unknown exit status {status}")
