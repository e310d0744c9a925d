"""Recovery of submissions by earlier controllers, and of submissions with unknown ids."""

from .commands import Unreachable
from .evidence import REPEATS
from .records import GIVEN_UP
from .session import Event, EventKind, Phase, Session, Task
from .states import JobState


def decide(session: Session, task: Task, now: float) -> None:
    """Take over, delete or drop the submission of an earlier controller.

    The phase of the task stays RECOVERED while the evidence is insufficient.
    """
    assert task.record
    evidence, record, patience = task.evidence, task.record, session.limits.patience
    status = evidence.status if evidence.answered else None
    wanted = record.fingerprint == task.fingerprint and not record.cancelled and bool(task.body)
    # Snakemake has not seen the files of a job that ended after this controller started.
    is_new = session.records.ended(record) >= session.started
    written = evidence.exit_status is not None
    if record.bundled and written:  # it ended, whatever the rest of the bundle does
        if wanted and (evidence.exit_status == 0 or is_new):
            return _take_over(session, task)
        return session.reset(task)
    if status and status.active:
        return _take_over(session, task) if wanted else _delete(session, task)
    if status and not evidence.sources_agree and not evidence.is_insistent(now, patience):
        return None
    if status is None and evidence.denials < REPEATS:
        return None
    succeeded = status is None or status.state is JobState.SUCCEEDED
    if wanted and succeeded and (is_new if written else status is not None):
        return _take_over(session, task)
    lost = status is None and not written and now - evidence.denied_since < patience
    if lost and not session.records.give_up(record):
        return None  # it has started, so the server may be wrong not to know it
    return session.reset(task)


def _take_over(session: Session, task: Task) -> None:
    assert task.record
    task.phase = Phase.WATCHED
    status = task.evidence.status if task.evidence.answered else None
    message = f"found again, {status.message if status else 'finished'}"
    session.events.append(Event(EventKind.SUBMITTED, task, task.record.active_name, message))


def _delete(session: Session, task: Task) -> None:
    """Delete an earlier submission before a new one writes the same files."""
    assert task.record
    task.phase = Phase.LEAVING
    if task.record.bundled and session.records.give_up(task.record):
        return session.reset(task)  # it has not started, and the bundle will skip it
    for other in session.tasks.values():  # of the same bundle
        if other.record and other.record.job_id == task.record.job_id:
            other.phase = Phase.LEAVING
    session.warn(
        f"job {task.record.job_id} of an earlier run writes files of rule {task.rule} from other "
        "inputs, or was cancelled: it is deleted, then a new job is submitted"
    )
    return await_end(session, task, now=session.clock())


def await_end(session: Session, task: Task, *, now: float) -> None:
    """Delete an earlier submission if necessary; reset its task when it has ended."""
    assert task.record
    evidence, patience = task.evidence, session.limits.patience
    written = evidence.exit_status is not None
    if evidence.has_ended and (written or evidence.is_insistent(now, patience)):
        return session.reset(task)
    if not task.deletion_sent and evidence.status and evidence.status.active:
        task.deletion_sent = not session.server.delete([str(task.record.job_id)])
    prevented = session.records.give_up(task.record)
    denied = evidence.denials >= REPEATS and now - evidence.denied_since >= patience
    if prevented or denied:
        session.reset(task)
    return None


def find_all(session: Session) -> bool:
    """Look up unknown ids, the longest unknown first; False if the server does not answer."""
    finding = [task for task in session.tasks.values() if task.phase is Phase.FINDING]
    for task in sorted(finding, key=lambda task: task.not_before):
        if session.stopping() or session.clock() < task.not_before:
            return True
        if not find(session, task):
            return False
    return True


def find(session: Session, task: Task, *, ask: bool = True) -> bool:
    """Look up the id of a submission in phase FINDING, for all tasks of its bundle.

    `ask`: ask the server if the job has not left its id on disk. False: it was not asked, or did
    not answer.
    """
    assert task.record
    now, name = session.clock(), task.record.name
    bundle = [
        (member, member.record)
        for member in session.tasks.values()
        if member.phase is Phase.FINDING and member.record and member.record.name == name
    ]
    for member, _ in bundle:
        member.not_before = now + session.limits.interval
    claims = (session.records.claimed_by(record) for _, record in bundle)
    claim = next((claim for claim in claims if claim and claim != GIVEN_UP), "")
    if not claim and not ask:
        return False
    try:
        ids = [claim] if claim else session.server.find(name)
    except Unreachable as error:
        if "unreachable" not in task.warnings:
            task.warnings.add("unreachable")
            session.warn(f"{name}: cannot look up its id yet: {error}")
        return False
    for member, record in bundle:
        if ids:
            member.record = session.records.with_id(record, str(ids[0]))
            member.phase, member.confirmed = Phase.RECOVERED, not claim
        # qsub may have been interrupted, or its request may still be on the way to the server.
        elif now - record.written >= session.limits.settling and session.records.give_up(record):
            session.reset(member)
    return True
