"""Tracker of the jobs of one controller: it recovers, submits, watches and deletes them.

It knows neither Snakemake nor processes. The executor adds tasks and calls `step`, which talks to
the server (`Commands`, or a simulated one) and to the records on disk, and returns events.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from . import outcome, recovery
from .commands import Dialect
from .evidence import Evidence
from .polling import Poller
from .queues import ANY, Queues
from .records import Record, Records
from .session import Event, Limits, Phase, Server, Session, Task
from .submission import Submitter

CROWDED_SECONDS = 2.0
"""Seconds between checks whether a job has started, while tasks wait for room in its queue."""


class Tracker:
    """All tasks of a controller."""

    def __init__(
        self,
        server: Server,
        records: Records,
        *,
        limits: Limits,
        dialect: Dialect,
        warn: Callable[[str], None] = print,
        clock: Callable[[], float] = time.time,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.session = Session(server, records, limits, dialect, warn, clock, stopping)
        self.tasks = self.session.tasks
        self._poller = Poller(self.session)
        self._queues = Queues(limits, records)
        self._submitter = Submitter(self.session, self._queues)
        self._earlier = {record.key: record for record in records.load()}
        self._key_of_output = {
            path: record.key for record in self._earlier.values() for path in record.outputs
        }

    def add(self, task: Task) -> None:
        """Add a task. If it was submitted before, the submission is recovered, not repeated."""
        previous = self.tasks.get(task.key)
        if previous and previous.record:
            task.phase, task.record, task.evidence = previous.phase, previous.record, Evidence()
            task.confirmed = previous.confirmed
        self.tasks[task.key] = task
        if record := self._earlier.pop(task.key, None):
            self._recover(task, record)
        keys = {self._key_of_output[path] for path in task.outputs if path in self._key_of_output}
        for key in keys - {task.key}:
            if record := self._earlier.pop(key, None):
                leftover = Task(key, record.name, {}, task.request, "", (), "")
                self.tasks[key] = leftover
                self._recover(leftover, record)
            if key in self.tasks:
                task.blockers.add(key)

    def _recover(self, task: Task, record: Record) -> None:
        task.record, task.evidence = record, Evidence()
        task.phase = Phase.RECOVERED if record.job_id else Phase.FINDING
        self.session.progress[task.key] = record.progress
        self.session.avoided[task.key] = record.avoided

    def step(self) -> list[Event]:
        """Poll the server if the interval has passed, look up unknown ids, submit."""
        session = self.session
        session.events = []
        tasks, now = self._poller.poll(), session.clock()
        for task in tasks:
            self._advance(task, now)
        if not recovery.find_all(session):
            self._queues.pause(ANY, session.clock() + session.limits.interval)
        self._submitter.submit_ready(until=self._poller.next_poll)
        return session.events

    def _advance(self, task: Task, now: float) -> None:
        if task.phase is Phase.RECOVERED:
            recovery.decide(self.session, task, now)
        elif task.phase is Phase.LEAVING:
            recovery.await_end(self.session, task, now=now)
        if task.phase is Phase.WATCHED:
            outcome.decide(self.session, task, now)

    def wait_seconds(self) -> float:
        """Seconds until the next step is due, unless a task is added."""
        seconds = max(self._poller.next_poll - self.session.clock(), 0.0)
        return min(seconds, CROWDED_SECONDS) if self._queues.crowded else seconds

    def cancel(self, sleep: Callable[[float], object] = time.sleep) -> list[str]:
        """Delete all jobs; return error messages. The next run recovers jobs that stay."""
        submitted = [task for task in self.tasks.values() if task.record]
        session, errors = self.session, self._mark_cancelled(submitted)
        records = [(task.record, task.confirmed) for task in submitted if task.record]
        ids = [
            *dict.fromkeys(each.job_id for each, confirmed in records if each.job_id and confirmed)
        ]
        # An unconfirmed id of an earlier controller can belong to another job.
        errors += [
            f"job {record.job_id} of an earlier run was not yet looked up"
            for record, confirmed in records
            if record.job_id and not confirmed
        ]
        for chunk in chunks(ids, 200):
            for pause in (1, 2, 0):
                if not (message := session.server.delete(chunk)):
                    break
                sleep(pause)
            else:
                errors.append(f"{session.dialect.delete} {' '.join(chunk)}: {message}")
        return errors

    def _mark_cancelled(self, tasks: Sequence[Task]) -> list[str]:
        """Note on disk that tasks are cancelled, so that waiting jobs do nothing."""
        records, errors, answers = self.session.records, [], True
        for task in tasks:
            try:
                if task.phase is Phase.FINDING:
                    answers = recovery.find(self.session, task, ask=answers) and answers
                if task.record is None:  # the server never had it
                    continue
                record = replace(task.record, cancelled=True)
                records.write(record, durable=False)  # qdel must not wait for disks
                # Jobs that have not started do nothing now, even if PBS cannot be reached.
                if records.give_up(record) and not record.job_id:
                    records.drop(record)
            except OSError as error:
                errors.append(f"{error.filename}: {error.strerror}")
        return errors


def chunks(items: Sequence[str], size: int) -> Iterable[Sequence[str]]:
    return (items[start : start + size] for start in range(0, len(items), size))
