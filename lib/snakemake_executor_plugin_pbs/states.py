"""What PBS says of a job, as a table: job_state, substate and Exit_status become a reading.

Measured on OpenPBS 23.06.06; the meaning of negative exit statuses is that of its job.h.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

FINISHED, TERMINATED = 92, 91  # substates of the state F; 93 is a failure


class Kind(Enum):
    """What a reading asks for."""

    WAITING = "waiting"  # in a queue, not yet begun
    HELD = "held"  # in a queue, and stays there until somebody releases it
    NEVER = "never"  # in a queue, and stays there for ever
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DELETED = "deleted"  # a failure that a person wanted: not to be retried


ENDED = (Kind.SUCCEEDED, Kind.FAILED, Kind.DELETED)


@dataclass(frozen=True)
class Reading:
    """One answer of PBS about one job, in our words."""

    kind: Kind
    message: str

    @property
    def active(self) -> bool:
        """Whether the job is still in PBS's hands."""
        return self.kind not in ENDED


STATES = {
    "Q": (Kind.WAITING, "queued"),
    "T": (Kind.WAITING, "being moved to another queue"),
    "W": (Kind.WAITING, "waiting for its start time"),
    "M": (Kind.RUNNING, "moved to another server"),  # of which no more is told
    "H": (Kind.HELD, "held"),
    "R": (Kind.RUNNING, "running"),
    "B": (Kind.RUNNING, "array begun"),
    "E": (Kind.RUNNING, "ending"),
    "S": (Kind.RUNNING, "suspended by the server"),
    "U": (Kind.RUNNING, "suspended, for its host is in use"),
}

HOLDS = {"u": "by a user", "o": "by an operator", "s": "by the system", "p": "for a bad password"}

KILLED = "used more than was asked for and was killed by PBS: "
NODE = "was lost with its node: "
REFUSED = "could not be started by PBS: "
EXIT_STATUS = {
    -1: REFUSED + "an error before its files were there",
    -2: REFUSED + "an error after its files were there",
    -3: REFUSED + "PBS was to try again",
    -4: NODE + "PBS's daemon there was started anew",
    -5: NODE + "PBS's daemon there was started anew, and its checkpoint cannot move",
    -6: NODE + "PBS's daemon there was started anew, and its checkpoint can move",
    -7: REFUSED + "its checkpoint could not be taken up",
    -10: REFUSED + "its user or group is not known on the node",
    -11: "was to be run again by PBS",
    -12: "was checkpointed and killed",
    -13: REFUSED + "a bad password",
    -14: NODE + "its first node lost touch with another one",
    -15: "was to be run again from its checkpoint",
    -16: REFUSED + "a hook of the site rejected it for now",
    -17: REFUSED + "a hook of the site rejected it",
    -18: "was to be run again, as a hook of the site asked",
    -19: "was deleted by a hook of the site",
    -20: NODE + "the server lost touch with its first node",
    -21: REFUSED + "a security fault of PBS's folder",
    -22: REFUSED + "a hook of the site failed or took too long",
    -23: REFUSED + "no Kerberos credentials",
    -24: KILLED + "ncpus, for a moment",
    -25: KILLED + "ncpus, on the whole",
    -26: KILLED + "vmem",
    -27: KILLED + "memory; raise mem_mb",
    -28: KILLED + "CPU time",
    -29: KILLED + "walltime; raise runtime",
    -30: NODE + "another of its nodes did not join",
    -31: KILLED + "huge pages",
    -32: NODE + "PBS's daemon there had forgotten the job",
}


def read(job: Mapping[str, Any]) -> Reading | None:
    """Put what qstat says of a job into words; None where it says too little to go by.

    Args:
        job: attributes as `qstat -x -f -F json` names them.
    """
    state = job.get("job_state")
    if state == "F":
        return _ended(job)
    if state not in STATES:
        return None
    kind, message = STATES[state]
    comment = str(job.get("comment", "")).strip()
    if state == "Q" and comment.startswith("Can Never Run"):
        return Reading(Kind.NEVER, f"can never run: {comment.partition(': ')[2] or comment}")
    if kind is Kind.HELD:
        told = ", ".join(HOLDS[hold] for hold in str(job.get("Hold_Types", "")) if hold in HOLDS)
        return Reading(kind, " ".join(filter(None, (message, told, comment and f"({comment})"))))
    return Reading(kind, message)


def _ended(job: Mapping[str, Any]) -> Reading | None:
    """A job of the state F, which succeeded only where all three of its numbers say so."""
    try:
        substate = int(job["substate"])
        status = int(job["Exit_status"]) if "Exit_status" in job else None
    except (KeyError, ValueError, TypeError):
        return None
    if substate == FINISHED and status == 0:
        return Reading(Kind.SUCCEEDED, "finished")
    if substate == TERMINATED:
        running = "running" if status is not None else "in the queue"
        comment = job.get("comment", "")
        by = str(comment).rpartition(" terminated by ")[2] if " terminated by " in comment else ""
        return Reading(Kind.DELETED, f"was deleted while {running}{by and f' by {by}'}")
    if status is None or status == 0:
        return Reading(
            Kind.FAILED, f"ended in an unknown way (substate {substate}, Exit_status {status})"
        )
    return Reading(Kind.FAILED, exit_message(status))


def exit_message(status: int) -> str:
    """Say what an exit status other than 0 means; above 256 it holds a signal."""
    if status in EXIT_STATUS:
        return EXIT_STATUS[status]
    if status < 0:
        return f"was ended by PBS with the unknown exit status {status}"
    if status > 256:
        return f"was killed by signal {status - 256}"
    return f"failed with exit status {status}"
