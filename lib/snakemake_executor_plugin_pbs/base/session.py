"""Tasks of a controller, and the state that all parts of the tracker share."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from .commands import Dialect, StatusReply
from .evidence import Evidence
from .records import Record, Records
from .request import SubmitRequest


class Server(Protocol):
    """Interface of a batch system; `commands.Commands` is the real one."""

    def submit(self, arguments: Sequence[str], script: Path) -> str: ...

    def status(self, ids: Sequence[str]) -> StatusReply: ...

    def find(self, name: str) -> list[str]: ...

    def delete(self, ids: Sequence[str]) -> str: ...


class Phase(Enum):
    """Phases of a task."""

    READY = "ready"  # will be submitted
    FINDING = "finding"  # perhaps submitted, id unknown
    RECOVERED = "recovered"  # submitted by an earlier controller, no answer about it yet
    WATCHED = "watched"
    LEAVING = "leaving"  # its earlier submission must end before a new one


@dataclass
class Task:
    """One job of Snakemake.

    Args:
        key: identifies the job for every controller.
        fingerprint: of its inputs; a running job with another fingerprint is deleted.
        job: object of the caller, returned in events.
        next_request: returns the request of its next attempt; None: there is none.
    """

    key: str
    rule: str
    wildcards: dict[str, str]
    request: SubmitRequest
    body: str
    outputs: tuple[str, ...]
    fingerprint: str
    job: Any = None
    next_request: Callable[[], SubmitRequest | None] = lambda: None
    phase: Phase = Phase.READY
    record: Record | None = None
    evidence: Evidence = field(default_factory=Evidence)
    not_before: float = 0.0  # time of the next attempt to submit or find it
    warnings: set[str] = field(default_factory=set)  # already shown
    blockers: set[str] = field(default_factory=set)  # keys of other submissions of its files
    deletion_sent: bool = False
    confirmed: bool = False  # whether the server knows the id by this submission's name


class EventKind(Enum):
    """Kinds of events."""

    SUBMITTED = "submitted"  # or found again
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True)
class Event:
    """Change of a task that Snakemake must know."""

    kind: EventKind
    task: Task
    job_id: str = ""
    message: str = ""
    log: Path | None = None
    submitted: float = 0.0  # time of the submission
    retry: bool = True  # whether Snakemake may retry a failure


@dataclass(frozen=True)
class Limits:
    """Times in seconds, and numbers of jobs.

    Args:
        interval: time between two status calls.
        patience: time for which one source of evidence alone is not believed.
        settling: time after which a submission without an id is given up.
        chunk: jobs in one status call; the oldest answers come first.
        queued: queue to the number of jobs that may wait in it; * is any other queue. If only
            one may wait, ready tasks of the same rule and request share a job.
    """

    interval: float = 10.0
    patience: float = 300.0
    settling: float = 90.0
    chunk: int = 2000
    queued: dict[str, int] = field(default_factory=dict)


@dataclass
class Session:
    """Tasks of a controller, and its access to the batch system."""

    server: Server
    records: Records
    limits: Limits
    dialect: Dialect
    warn: Callable[[str], None] = print
    clock: Callable[[], float] = time.time
    stopping: Callable[[], bool] = lambda: False
    tasks: dict[str, Task] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)  # of the current step
    progress: dict[str, str] = field(default_factory=dict)  # task's key to its last progress
    avoided: dict[str, tuple[str, ...]] = field(default_factory=dict)  # task's key to hosts
    failed_in_bundle: set[str] = field(default_factory=set)  # keys of tasks
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def finish(self, task: Task, kind: EventKind, message: str, *, retry: bool = True) -> None:
        """Remove a task that succeeded or failed, and add the event."""
        assert task.record
        record, log = task.record, self.records.path(task.record, "log")
        submitted = self.records.submitted(record)
        self.records.drop(record, keep_files=kind is EventKind.FAILED)
        del self.tasks[task.key]
        self.events.append(Event(kind, task, record.active_name, message, log, submitted, retry))

    def reset(self, task: Task) -> None:
        """Drop a task's submission, so that it can be submitted again."""
        if task.record:
            self.records.drop(task.record, keep_files=True)
        task.record, task.evidence = None, Evidence()
        task.deletion_sent = task.confirmed = False
        task.phase = Phase.READY
        if not task.body:  # a leftover of an earlier run, which only blocked other tasks
            del self.tasks[task.key]
