"""Submits a task again whose job failed, if its work progressed; otherwise it has failed."""

from .records import GIVEN_UP
from .session import EventKind, Session, Task
from .states import JobState

STOPPED = "stopped "  # start of the progress of work that stopped as planned
EARLY = 60.0  # seconds before the end of the walltime; PBS itself ends a job at the end or later


def fail_or_resubmit(session: Session, task: Task, *, message: str) -> None:
    """End a task that failed; submit it again if its work progressed in this job."""
    assert task.record
    record, records = task.record, session.records
    state = task.evidence.status.state if task.evidence.status else None
    message, is_deleted = _reason(session, task, message), was_deleted(session, task)
    if state is JobState.NEVER:
        session.server.delete([str(record.job_id)])
        records.give_up(record)
    if record.bundled:
        session.failed_in_bundle.add(task.key)
    _avoid_faulty_hosts(session, task)
    if reason := records.reason_against_retry(record):
        message = f"{message}; {reason}"
        return session.finish(task, EventKind.FAILED, message, retry=False)
    previous, progress = session.progress.get(task.key), records.progress(record)
    if progress and progress != previous and not is_deleted:
        # Work that stopped in time, as planned, has not failed.
        said = progress if progress.startswith(STOPPED) else f"{message}; {progress}"
        session.warn(f"job {record.active_name} of rule {task.rule} {said}; a new job continues")
        session.progress[task.key] = progress
        return session.reset(task)
    if reached := progress or previous:
        message = f"{message}; {reached}, run Snakemake again to continue"
    return session.finish(task, EventKind.FAILED, message, retry=not is_deleted)


def was_deleted(session: Session, task: Task) -> bool:
    """Whether a person ended the job, also if the server keeps no history: by its own note."""
    assert task.record
    if status := task.evidence.status:
        return status.state is JobState.DELETED
    left = session.records.seconds_left(task.record)
    return left is not None and left > EARLY


def _reason(session: Session, task: Task, message: str) -> str:
    """Message about a failed job, with reasons that the server does not know."""
    assert task.record
    records, record = session.records, task.record
    if not was_deleted(session, task):
        is_late = task.evidence.status is None and records.seconds_left(record) is not None
        if is_late:
            system = session.dialect.system
            return (
                f"used more than it requested and was killed by {system}: walltime; raise runtime"
            )
        return message
    if record.bundled and records.claimed_by(record) in (None, GIVEN_UP):
        return "had not started when the job that it shares was deleted"
    if task.evidence.status is None:
        return f"was deleted while running, {records.seconds_left(record):.0f} s before its end"
    return message


def _avoid_faulty_hosts(session: Session, task: Task) -> None:
    """Note hosts that the work found faulty: the next job of the task does not get them."""
    assert task.record
    if not (faulty := session.records.faulty_hosts(task.record)):
        return
    hosts, dialect = ", ".join(faulty), session.dialect
    if dialect.avoid is None:
        end = f"{dialect.system} cannot leave them out; tell the site if it happens again"
    else:
        end = "its next jobs do not use them"
        known = session.avoided.get(task.key, ())
        session.avoided[task.key] = tuple(dict.fromkeys((*known, *faulty)))
    name = task.record.active_name
    session.warn(f"job {name} of rule {task.rule} found hosts faulty: {hosts}; {end}")
