"""Limits on the number of waiting jobs per queue, and pauses of queues after an error."""

from collections.abc import Iterable

from .records import Records
from .session import Limits, Task
from .states import JobState

ANY = "*"
"""Stands for all queues without their own limit, and for the whole server."""


class Queues:
    """Waiting jobs of one controller in each queue; `records` show which have started since.

    `crowded`: a queue had no room for a ready task in this round.
    """

    def __init__(self, limits: Limits, records: Records) -> None:
        self.limits, self.records = limits, records
        self.crowded = False
        self._paused_until: dict[str, float] = {}
        self._waiting: dict[str, list[Task]] = {}
        self._full: set[str] = set()  # in this round

    def begin_round(self, tasks: Iterable[Task]) -> None:
        """Count the waiting jobs of each queue, including jobs without an answer so far."""
        self.crowded, self._waiting, self._full = False, {}, set()
        for task in tasks:
            status = task.evidence.status
            if task.record and (
                status is None or status.state in (JobState.WAITING, JobState.HELD)
            ):
                self.note_submitted(task)

    def note_submitted(self, task: Task) -> None:
        self._waiting.setdefault(task.request.queue, []).append(task)

    def pause(self, queue: str, until: float) -> None:
        """Close a queue (`ANY`: all queues) until a time."""
        self._paused_until[queue] = until

    def is_open(self, queue: str, now: float) -> bool:
        """Whether a job may be submitted to a queue now."""
        if now < max(self._paused_until.get(name, 0.0) for name in (queue, ANY)):
            return False
        limit, waiting = self.limit(queue), self._waiting.get(queue, [])
        if limit is None or _num_jobs(waiting) < limit:
            return True
        # The last status call was some time ago. A job's claim shows at once that it started.
        if queue not in self._full:
            started = {
                task.record.name for task in waiting if task.record and self._has_started(task)
            }
            waiting[:] = [
                task for task in waiting if task.record and task.record.name not in started
            ]
        if _num_jobs(waiting) < limit:
            return True
        self._full.add(queue)
        self.crowded = True
        return False

    def is_narrow(self, queue: str) -> bool:
        """Whether only one job may wait in a queue."""
        return self.limit(queue) == 1

    def limit(self, queue: str) -> int | None:
        """Number of jobs that may wait in a queue; None: unlimited."""
        return self.limits.queued.get(queue, self.limits.queued.get(ANY))

    def _has_started(self, task: Task) -> bool:
        return task.record is not None and self.records.claimed_by(task.record) is not None


def _num_jobs(tasks: Iterable[Task]) -> int:
    """Number of jobs of tasks; the tasks of a bundle share a job."""
    return len({task.record.name for task in tasks if task.record})
