"""How many jobs may wait in each queue, and which queues rest after a refusal."""

from collections.abc import Iterable

from .records import Records
from .states import Kind
from .tasks import Limits, Task

ANY = "*"
"""Stands for all queues that have no limit of their own, and for the server as a whole."""


class Queues:
    """The queues as one controller fills them.

    Args:
        limits: `queued` says how many jobs may wait in a queue.
        records: tell whether a job has begun since the server was last asked.

    Attributes:
        crowded: whether a ready task found no room in this round.
    """

    def __init__(self, limits: Limits, records: Records) -> None:
        self.limits, self.records = limits, records
        self.crowded = False
        self._rests: dict[str, float] = {}
        self._waiting: dict[str, list[Task]] = {}
        self._full: set[str] = set()  # those found full in this round

    def begin_round(self, tasks: Iterable[Task]) -> None:
        """Count the jobs that wait in each queue, those not heard of yet among them."""
        self.crowded, self._waiting, self._full = False, {}, set()
        for task in tasks:
            reading = task.evidence.reading
            if task.record and (reading is None or reading.kind in (Kind.WAITING, Kind.HELD)):
                self.note_submitted(task)

    def note_submitted(self, task: Task) -> None:
        """Count one more job that waits."""
        self._waiting.setdefault(task.request.queue, []).append(task)

    def rest(self, queue: str, until: float) -> None:
        """Submit nothing to a queue (`ANY`: to no queue) until then."""
        self._rests[queue] = until

    def is_open(self, queue: str, now: float) -> bool:
        """Whether a job may be submitted to a queue now."""
        if now < max(self._rests.get(name, 0.0) for name in (queue, ANY)):
            return False
        limit, waiting = self.limit(queue), self._waiting.get(queue, [])
        if limit is None or _num_jobs(waiting) < limit:
            return True
        # The server was asked some time ago. A job's claim shows at once that it has begun.
        if queue not in self._full:
            begun = {task.record.name for task in waiting if task.record and self._has_begun(task)}
            waiting[:] = [task for task in waiting if task.record and task.record.name not in begun]
        if _num_jobs(waiting) < limit:
            return True
        self._full.add(queue)
        self.crowded = True
        return False

    def is_narrow(self, queue: str) -> bool:
        """Whether only one job may wait in a queue."""
        return self.limit(queue) == 1

    def limit(self, queue: str) -> int | None:
        """How many jobs may wait in a queue; None: any number."""
        return self.limits.queued.get(queue, self.limits.queued.get(ANY))

    def _has_begun(self, task: Task) -> bool:
        return task.record is not None and self.records.claimed_by(task.record) is not None


def _num_jobs(tasks: Iterable[Task]) -> int:
    """Jobs of tasks: those of a bundle share one."""
    return len({task.record.name for task in tasks if task.record})
