"""What the tracker handles: tasks, events that it returns, its limits, the server that it asks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from .evidence import Evidence
from .records import Record
from .replies import Answer
from .request import Request


class Server(Protocol):
    """What the tracker asks of PBS; `commands.Commands` is the real one."""

    def submit(self, arguments: Sequence[str], script: Path) -> str:
        """Submit a job; its id."""

    def status(self, ids: Sequence[str]) -> Answer:
        """Ask about jobs."""

    def find(self, name: str) -> list[str]:
        """Ids of jobs of this name that have not ended."""

    def delete(self, ids: Sequence[str]) -> str:
        """Delete jobs; what went wrong."""


class Phase(Enum):
    """Where a task stands."""

    READY = "ready"  # to be submitted
    FINDING = "finding"  # perhaps submitted, id unknown
    MEETING = "meeting"  # submitted by an earlier controller, not heard of yet
    WATCHED = "watched"
    LEAVING = "leaving"  # an earlier submission that has to go before a new one


@dataclass
class Task:
    """One job of Snakemake.

    Args:
        key: what identifies it, whatever controller runs it.
        rule: its rule's name; `wildcards`: their values, for its name in PBS.
        body: text of the shell script that runs it.
        outputs: files that it makes.
        fingerprint: what it makes them from; a running job of another one is not taken over.
        job: whatever the caller wants to find again in events.
    """

    key: str
    rule: str
    wildcards: dict[str, str]
    request: Request
    body: str
    outputs: tuple[str, ...]
    fingerprint: str
    job: Any = None
    phase: Phase = Phase.READY
    record: Record | None = None
    evidence: Evidence = field(default_factory=Evidence)
    not_before: float = 0.0
    told: set[str] = field(default_factory=set)
    blockers: set[str] = field(default_factory=set)  # keys of other submissions of its files
    deletion_asked: bool = False


class What(Enum):
    """Kinds of events."""

    SUBMITTED = "submitted"  # or found again
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True)
class Event:
    """Something that Snakemake has to hear of."""

    what: What
    task: Task
    job_id: str = ""
    message: str = ""
    log: Path | None = None
    since: float = 0.0  # when the job was submitted
    retry: bool = True  # whether a failure may be tried again


@dataclass(frozen=True)
class Limits:
    """Times in seconds, and numbers of jobs.

    Args:
        interval: between two calls of qstat.
        patience: how long one witness alone is not believed.
        settling: how long after its writing a submission without an id is still looked for.
        chunk: jobs in one call of qstat; those asked about longest ago come first.
        queued: queue to the number of jobs that may wait in it; * is any other queue. If only
            one may wait, ready tasks of the same rule and request share a job.
    """

    interval: float = 10.0
    patience: float = 300.0
    settling: float = 90.0
    chunk: int = 2000
    queued: dict[str, int] = field(default_factory=dict)
