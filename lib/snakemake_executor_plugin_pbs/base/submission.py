"""Submission of ready tasks, each as a job or several as a bundle."""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from .commands import Later, Refused, Unsure
from .evidence import Evidence
from .queues import ANY, Queues
from .records import Record, new_token
from .request import job_name
from .script import script
from .session import Event, EventKind, Phase, Session, Task

MOST_BUNDLED = 100
"""Maximum number of tasks that share a job."""


class Submitter:
    """Submits the tasks of a session."""

    def __init__(self, session: Session, queues: Queues) -> None:
        self.session, self.queues = session, queues
        self._warned_queues: set[str] = set()  # they have not taken a job since

    def submit_ready(self, until: float) -> None:
        """Submit ready tasks; after `until` at most one, so that the status call is not late."""
        session = self.session
        self.queues.begin_round(session.tasks.values())
        submitted = 0
        ready = [task for task in session.tasks.values() if task.phase is Phase.READY]
        # Tasks that the server did not take come after tasks that were not tried.
        ready.sort(key=lambda task: task.not_before)
        for task in ready:
            now, queue = session.clock(), task.request.queue
            if session.stopping() or (submitted and now >= until):
                return
            if not self._is_due(task, now) or not self.queues.is_open(queue, now):
                continue
            tasks = [task]
            if self.queues.is_narrow(queue) and task.key not in session.failed_in_bundle:
                tasks += islice(self._companions(task, ready, now=now), MOST_BUNDLED - 1)
            self._submit(tasks)
            submitted += 1
            if task.record:
                self.queues.note_submitted(task)

    def _is_due(self, task: Task, now: float) -> bool:
        tasks = self.session.tasks
        task.blockers &= tasks.keys()
        waits = task.phase is Phase.READY and tasks.get(task.key) is task
        return waits and not task.blockers and now >= task.not_before

    def _companions(self, task: Task, ready: Sequence[Task], *, now: float) -> Iterator[Task]:
        """Ready tasks that may share a job with a task."""
        for other in ready:
            alone = other is task or other.key in self.session.failed_in_bundle
            if not alone and can_share_job(other, task) and self._is_due(other, now):
                yield other

    def _submit(self, tasks: Sequence[Task]) -> None:
        """Submit one job for a task, or for several of the same rule and request."""
        session, first, now = self.session, tasks[0], self.session.clock()
        path, arguments = prepare(session, tasks, now=now)
        queue, command = first.request.queue, session.dialect.submit
        try:
            job_id = session.server.submit(arguments, path)
        except Refused as error:
            if hosts := avoided(session, tasks):
                # Without these hosts, there may be too few.
                session.warn(
                    f"rule {first.rule}: {command} refuses a job without {', '.join(hosts)} "
                    f"({error}); it may use them"
                )
                for task in tasks:
                    session.avoided.pop(task.key, None)
                    session.reset(task)
                return
            for task in tasks:
                message = f"was refused by {command}: {error}"
                retry = task.next_request() != task.request  # the same would be refused again
                session.finish(task, EventKind.FAILED, message, retry=retry)
        except Later as error:
            # A limit, or no server: the next job of this queue would fail the same way.
            self._warn_once(queue, f"{command}: {error}: retrying")
            for task in tasks:
                assert task.record
                session.records.discard(task.record)
                task.record, task.not_before = None, session.clock() + session.limits.interval
            self.queues.pause(queue, first.not_before)
        except Unsure as error:
            assert first.record
            self._warn_once(queue, f"{command}: {error}: looking for job {first.record.name}")
            for task in tasks:
                task.phase, task.not_before = Phase.FINDING, now + session.limits.interval
            self.queues.pause(ANY, session.clock() + session.limits.interval)
        else:
            self._warned_queues.discard(queue)
            for task in tasks:
                assert task.record
                task.record = session.records.with_id(task.record, job_id)
                task.phase, task.confirmed = Phase.WATCHED, True
                session.events.append(Event(EventKind.SUBMITTED, task, job_id))

    def _warn_once(self, queue: str, text: str) -> None:
        """Warn that a queue takes no jobs; again only after it has taken one."""
        if queue not in self._warned_queues:
            self._warned_queues.add(queue)
            self.session.warn(f"queue {queue}: {text}" if queue else text)


def can_share_job(task: Task, other: Task) -> bool:
    """Whether two tasks may share a job: they have the same rule and request."""
    return task.rule == other.rule and task.request == other.request and bool(task.body)


def prepare(session: Session, tasks: Sequence[Task], *, now: float) -> tuple[Path, tuple[str, ...]]:
    """Write a record for each task, and their script; return it with options of the submit command.

    Several tasks are a bundle: they share a job.
    """
    records, dialect = session.records, session.dialect
    first, bundled = tasks[0], len(tasks) > 1
    tokens = [new_token() for _ in tasks]
    name = job_name(first.rule, {} if bundled else first.wildcards, token=tokens[0])
    submissions = []
    for task, token in zip(tasks, tokens, strict=True):
        record = Record(
            token, name, task.key, task.outputs, task.fingerprint, written=now, bundled=bundled,
            progress=session.progress.get(task.key, ""), avoided=session.avoided.get(task.key, ()),
        )  # fmt: skip
        records.write(record)
        task.record, task.evidence = record, Evidence()
        body = records.path(record, "job")
        _write(body, task.body)
        submissions.append((body.parent, token))
    assert first.record
    path = records.path(first.record, "sh")
    request = first.request
    text = script(
        submissions, dialect.id_variable, seconds=request.seconds, container=request.container
    )
    _write(path, text)
    # The folder of a bundle's first task is removed before the bundle ends.
    output = Path(os.devnull) if bundled else records.path(first.record, dialect.label)
    arguments = first.request.arguments
    if dialect.avoid and (hosts := avoided(session, tasks)):
        arguments = dialect.avoid(arguments, hosts)
    return path, (*dialect.options(name, output), *arguments)


def avoided(session: Session, tasks: Sequence[Task]) -> list[str]:
    """Hosts that a job for some tasks is not to use, each once."""
    hosts = [host for task in tasks for host in session.avoided.get(task.key, ())]
    return list(dict.fromkeys(hosts))


def _write(path: Path, text: str) -> None:
    path.touch(0o700)  # the text may contain values of environment variables
    path.write_text(text)
