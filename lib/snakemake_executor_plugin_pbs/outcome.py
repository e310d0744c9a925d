"""Decides from the evidence whether a watched task succeeded, failed, or is submitted again."""

from .evidence import Verdict
from .session import Session
from .states import JobState
from .tasks import EventKind, Task


def decide(session: Session, task: Task, now: float) -> None:
    """End or resubmit a task if its evidence suffices; otherwise it stays watched."""
    assert task.record
    bundled = task.record.bundled
    verdict, message = task.evidence.verdict(now, session.limits.patience, bundled=bundled)
    if bundled and _was_not_reached(session, task, now=now):
        session.reset(task)
    elif verdict is Verdict.OPEN:
        _warn_if_held(session, task)
    elif verdict is Verdict.SUCCEEDED:
        session.finish(task, EventKind.SUCCEEDED, message)
    else:
        _fail(session, task, message=message)


def _was_not_reached(session: Session, task: Task, *, now: float) -> bool:
    """Whether a bundle ended before it started this task."""
    assert task.record
    evidence, patience = task.evidence, session.limits.patience
    if evidence.status and evidence.has_ended and evidence.status.state is not JobState.DELETED:
        ended = evidence.answered and evidence.is_insistent(now, patience)
    else:  # a server without history no longer knows the bundle
        ended = evidence.is_denied(now, patience)
    return ended and session.records.give_up(task.record)


def _fail(session: Session, task: Task, *, message: str) -> None:
    """End a task that failed; submit it again if its work progressed in this job."""
    assert task.record
    record, records = task.record, session.records
    state = task.evidence.status.state if task.evidence.status else None
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
    if progress and progress != previous and state is not JobState.DELETED:
        name = record.active_name
        session.warn(f"job {name} of rule {task.rule} {message}; {progress}; a new job continues")
        session.progress[task.key] = progress
        return session.reset(task)
    if reached := progress or previous:
        message = f"{message}; {reached}, run Snakemake again to continue"
    retry = state is not JobState.DELETED
    return session.finish(task, EventKind.FAILED, message, retry=retry)


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


def _warn_if_held(session: Session, task: Task) -> None:
    status, dialect = task.evidence.status, session.dialect
    if not status or status.state is not JobState.HELD or status.message in task.warnings:
        return
    task.warnings.add(status.message)
    job_id = task.record.job_id if task.record else ""
    held = status.message.startswith("held")
    end = f"`{dialect.release} {job_id}` releases it" if held else "this changes"
    session.warn(
        f"job {job_id} of rule {task.rule} is {status.message}; it waits until {end} or "
        f"`{dialect.delete} {job_id}` deletes it"
    )
