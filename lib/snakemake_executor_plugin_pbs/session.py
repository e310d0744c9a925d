"""State of a controller that all parts of the tracker share: tasks, server, records, clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .dialect import PBS, Dialect
from .evidence import Evidence
from .records import Records
from .tasks import Event, EventKind, Limits, Phase, Server, Task


@dataclass
class Session:
    """Tasks of a controller, and its access to the batch system."""

    server: Server
    records: Records
    limits: Limits
    warn: Callable[[str], None] = print
    clock: Callable[[], float] = time.time
    stopping: Callable[[], bool] = lambda: False
    dialect: Dialect = PBS
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
