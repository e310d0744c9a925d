"""States of jobs, in any batch system."""

from dataclasses import dataclass
from enum import Enum


class JobState(Enum):
    """States of a job that the executor handles differently."""

    WAITING = "waiting"  # in a queue, not yet started
    HELD = "held"  # stays in a queue until a person releases it
    NEVER = "never"  # stays in a queue forever, or runs without its script
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DELETED = "deleted"  # by a person, so it is not retried


ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.DELETED)


@dataclass(frozen=True)
class JobStatus:
    """Status that the server reported for a job, with a message for the user."""

    state: JobState
    message: str

    @property
    def active(self) -> bool:
        """Whether the job is queued or running."""
        return self.state not in ENDED


def exit_message(status: int) -> str:
    """Message for an exit status other than 0. Above 256 it contains a signal."""
    if status > 256:
        return f"was killed by signal {status - 256}"
    return f"failed with exit status {status}"
