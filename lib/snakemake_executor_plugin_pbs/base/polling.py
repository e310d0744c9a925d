"""Status calls: one call per interval for all jobs, and the evidence from its answer."""

from collections.abc import Sequence

from .commands import StatusReply, number
from .session import Session, Task
from .states import JobState

REPORTED_FAULTS = 3  # faults in a row after which the user is warned


class Poller:
    """Asks the server about the jobs of a session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.next_poll = session.started
        self._faults = 0  # in a row
        self._omissions_reported = False

    def poll(self) -> list[Task]:
        """Ask about the jobs if the interval is over; return tasks whose evidence was updated.

        There are none if the workflow is being stopped.
        """
        session, limits = self.session, self.session.limits
        if session.clock() < self.next_poll:
            return []
        tasks = [task for task in session.tasks.values() if task.record and task.record.job_id]
        if not tasks:
            self.next_poll = session.clock() + limits.interval
            return []
        tasks.sort(key=lambda task: (task.evidence.asked_at, task.evidence.answered_at))
        chunk = tasks[: limits.chunk]
        ids = [str(task.record.job_id) for task in chunk if task.record]
        answer = session.server.status([*dict.fromkeys(ids)])
        now = session.clock()
        self.next_poll = now + limits.interval
        if session.stopping():
            return []
        self._report_faults(answer, ids)
        for task in chunk:
            self._update_evidence(task, answer, now=now)
        return chunk

    def _report_faults(self, answer: StatusReply, ids: Sequence[str]) -> None:
        session, command = self.session, self.session.dialect.status
        denied = {number(job_id) for job_id in ids} & answer.unknown
        faulty = not answer.jobs and (bool(answer.fault) or not denied)
        if faulty and self._faults == REPORTED_FAULTS - 1:
            fault = answer.fault or "its reply has none of the jobs"
            session.warn(f"{command}: {fault}; jobs continue; retrying")
        if not faulty and self._faults >= REPORTED_FAULTS:
            session.warn(f"{command} answers again")
        self._faults = self._faults + 1 if faulty else 0
        if answer.omitted and not self._omissions_reported:
            self._omissions_reported = True
            session.warn(
                f"{command} omitted {answer.omitted} of {len(ids)} jobs that the server knows; "
                "each omitted job is asked about again"
            )

    def _report_other(self, task: Task, name: str) -> None:
        assert task.record
        if "other job" not in task.warnings:
            task.warnings.add("other job")
            self.session.warn(
                f"{task.record.job_id} is now another job, {name}: the server gave this id again; "
                f"it is left alone, and job {task.record.name} counts as unknown to the server"
            )

    def _update_evidence(self, task: Task, answer: StatusReply, *, now: float) -> None:
        assert task.record
        evidence, job_number = task.evidence, number(str(task.record.job_id))
        job = answer.jobs.get(job_number, {})
        # A reset server gives the same ids again. The name is ours alone: it ends with the
        # token of the submission.
        if is_other := job.get("Job_Name", task.record.name) != task.record.name:
            self._report_other(task, job["Job_Name"])
        if is_other or job_number in answer.unknown:
            evidence.note_denial(now)
        else:
            evidence.note_status(self.session.dialect.read(job), now)
        if job:
            task.confirmed = not is_other
        status = evidence.status
        queued = status is not None and status.state in (JobState.WAITING, JobState.HELD)
        # A job in a queue has no exit status: an existing file is from before it was requeued.
        ignored = queued and evidence.answered
        exit_status = None if ignored else self.session.records.exit_status(task.record)
        evidence.note_exit_status(exit_status, now)
