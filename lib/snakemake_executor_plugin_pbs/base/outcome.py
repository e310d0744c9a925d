"""Decides from the evidence whether a watched task has ended."""

from .evidence import Verdict
from .resubmission import fail_or_resubmit, was_deleted
from .session import EventKind, Session, Task
from .states import JobState


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
        fail_or_resubmit(session, task, message=message)


def _was_not_reached(session: Session, task: Task, *, now: float) -> bool:
    """Whether a bundle ended before it started this task."""
    assert task.record
    evidence, patience = task.evidence, session.limits.patience
    if evidence.status and evidence.has_ended and evidence.status.state is not JobState.DELETED:
        ended = evidence.answered and evidence.is_insistent(now, patience)
    else:  # a server without history no longer knows the bundle
        ended = evidence.is_denied(now, patience) and not was_deleted(session, task)
    return ended and session.records.give_up(task.record)


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
