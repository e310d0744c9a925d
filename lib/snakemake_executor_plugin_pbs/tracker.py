"""The jobs of one controller in PBS or Slurm: found again, submitted, watched, deleted.

It knows neither Snakemake nor processes: the executor adds tasks and calls `step`, which talks to
the server (`Commands`, or a simulated one) and to the records on disk, and returns what happened.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from .commands import Later, Refused, Unreachable, Unsure
from .dialect import PBS, Dialect
from .evidence import REPEATS, Belief, Evidence
from .queues import ANY, Queues
from .records import GIVEN_UP, Record, Records
from .replies import Answer, number
from .states import Kind, Reading
from .submission import are_alike, prepare
from .tasks import Event, Limits, Phase, Server, Task, What

CROWDED_SECONDS = 2.0
"""Seconds between checks whether a job has begun, while tasks wait for room in its queue."""
MOST_BUNDLED = 100
"""Tasks that share one job at the most."""


class Tracker:
    """All tasks of a controller.

    Args:
        server: the batch system.
        records: what is on disk.
        tell: is called with messages for the user.
        clock: seconds since 1970.
        stopping: is asked between two submissions whether there is to be no other.
        dialect: which batch system it is.
    """

    def __init__(
        self,
        server: Server,
        records: Records,
        limits: Limits,
        *,
        tell: Callable[[str], None] = print,
        clock: Callable[[], float] = time.time,
        stopping: Callable[[], bool] = lambda: False,
        dialect: Dialect = PBS,
    ) -> None:
        self.server, self.records, self.limits = server, records, limits
        self.tell, self.clock, self.stopping = tell, clock, stopping
        self.dialect = dialect
        self.tasks: dict[str, Task] = {}
        self.started = clock()
        self.next_poll = self.started
        self.faults = 0  # calls of qstat in a row that gave nothing
        self._omissions_told = False
        self._queues = Queues(limits, records)
        self._told_queues: set[str] = set()  # queues whose refusal was reported
        self._progress: dict[str, str] = {}  # key of a task to how far its work had come
        self._alone: set[str] = set()  # keys of tasks that failed in a bundle
        self._old = {record.key: record for record in records.load()}
        self._makers = {
            path: record.key for record in self._old.values() for path in record.outputs
        }

    def add(self, task: Task) -> None:
        """Take a task on; an earlier submission of it is found again, not repeated."""
        standing = self.tasks.get(task.key)
        if standing and standing.record:
            task.phase, task.record, task.evidence = standing.phase, standing.record, Evidence()
        self.tasks[task.key] = task
        if old := self._old.pop(task.key, None):
            self._meet(task, old)
        for key in {self._makers[path] for path in task.outputs if path in self._makers}:
            if key != task.key and (old := self._old.pop(key, None)):
                leftover = Task(key, old.name, {}, task.request, "", (), "")
                self.tasks[key] = leftover
                self._meet(leftover, old)
            if key != task.key and key in self.tasks:
                task.blockers.add(key)

    def _meet(self, task: Task, record: Record) -> None:
        task.record = record
        self._progress[task.key] = record.progress
        task.phase = Phase.MEETING if record.job_id else Phase.FINDING
        task.evidence = Evidence()

    def step(self) -> list[Event]:
        """Do what is due: ask PBS once if the interval is over, look for lost ids, submit."""
        events: list[Event] = []
        if self.clock() >= self.next_poll:
            self._poll(events)
        self._find_all()
        self._submit_all(events)
        return events

    def wait_seconds(self) -> float:
        """How long nothing is due, unless a task is added."""
        seconds = max(self.next_poll - self.clock(), 0.0)
        return min(seconds, CROWDED_SECONDS) if self._queues.crowded else seconds

    # -- watching

    def _poll(self, events: list[Event]) -> None:
        asked = [task for task in self.tasks.values() if task.record and task.record.job_id]
        if not asked:
            self.next_poll = self.clock() + self.limits.interval
            return
        asked.sort(key=lambda task: (task.evidence.asked, task.evidence.heard))
        chunk = asked[: self.limits.chunk]
        ids = [str(task.record.job_id) for task in chunk if task.record]
        answer = self.server.status([*dict.fromkeys(ids)])
        now = self.clock()
        self.next_poll = now + self.limits.interval
        if self.stopping():
            return
        self._tell_faults(answer, chunk)
        for task in chunk:
            self._note(task, answer, now)
            self._advance(task, now, events)

    def _tell_faults(self, answer: Answer, asked: Sequence[Task]) -> None:
        ids = {number(str(task.record.job_id)) for task in asked if task.record}
        silent = not answer.jobs and (bool(answer.fault) or not ids & answer.unknown)
        if silent and self.faults == 2:
            fault = answer.fault or "its reply has none of the jobs"
            self.tell(f"{self.dialect.status}: {fault}; jobs go on, and it is asked again")
        if not silent and self.faults > 2:
            self.tell(f"{self.dialect.status} answers again")
        self.faults = self.faults + 1 if silent else 0
        if answer.omitted and not self._omissions_told:
            self._omissions_told = True
            self.tell(
                f"{self.dialect.status} left out {answer.omitted} of {len(asked)} jobs that the "
                "server knows; those that it leaves out are asked about first the next time"
            )

    def _note(self, task: Task, answer: Answer, now: float) -> None:
        assert task.record
        evidence, its_number = task.evidence, number(str(task.record.job_id))
        if its_number in answer.unknown:
            evidence.note_denial(now)
        else:
            evidence.note_reading(self.dialect.read(answer.jobs.get(its_number, {})), now)
        queued = evidence.reading and evidence.reading.kind in (Kind.WAITING, Kind.HELD)
        # A job that waits has no exit status; an old one is of a run before it was queued again.
        known = not queued or not evidence.answered
        status = self.records.exit_status(task.record) if known else None
        evidence.note_exit_status(status, now)

    def _advance(self, task: Task, now: float, events: list[Event]) -> None:
        if task.phase is Phase.MEETING:
            self._greet(task, now, events)
        elif task.phase is Phase.LEAVING:
            self._see_off(task, now)
        if task.phase is not Phase.WATCHED:
            return
        assert task.record
        bundled = task.record.bundled
        belief, message = task.evidence.belief(now, self.limits.patience, bundled=bundled)
        if bundled and self._was_left_out(task, now):
            self._renew(task)
        elif belief is Belief.OPEN:
            self._tell_held(task)
        elif belief is Belief.SUCCEEDED:
            self._finish(task, What.SUCCEEDED, message, events)
        else:
            self._fail(task, message, events)

    def _was_left_out(self, task: Task, now: float) -> bool:
        """Whether a bundle ended before it came to this task."""
        assert task.record
        evidence, reading, patience = task.evidence, task.evidence.reading, self.limits.patience
        if reading and not reading.active and reading.kind is not Kind.DELETED:
            over = evidence.answered and evidence.insisted(now, patience)
        else:  # a server without history has forgotten it
            over = evidence.is_denied(now, patience)
        return over and self.records.give_up(task.record)

    def _fail(self, task: Task, message: str, events: list[Event]) -> None:
        """End a task that has failed; submit it again if its work moved forward in this job."""
        assert task.record
        reading = task.evidence.reading
        kind = reading.kind if reading else None
        if kind is Kind.NEVER:
            self.server.delete([str(task.record.job_id)])
            self.records.give_up(task.record)
        if task.record.bundled:
            self._alone.add(task.key)
        progress = self.records.progress(task.record)
        moved = progress and progress != self._progress.get(task.key)
        if moved and kind is not Kind.DELETED:
            name = task.record.active_name
            self.tell(f"job {name} of rule {task.rule} {message}; {progress}; a new job goes on")
            self._progress[task.key] = progress
            return self._renew(task)
        reached = progress or self._progress.get(task.key)
        if reached:
            message = f"{message}; {reached}, run Snakemake again to go on"
        return self._finish(task, What.FAILED, message, events, retry=kind is not Kind.DELETED)

    def _tell_held(self, task: Task) -> None:
        reading = task.evidence.reading
        if reading and reading.kind is Kind.HELD and reading.message not in task.told:
            task.told.add(reading.message)
            name = task.record.job_id if task.record else ""
            held = reading.message.startswith("held")
            until = f"`{self.dialect.release} {name}` releases it" if held else "this changes"
            self.tell(
                f"job {name} of rule {task.rule} is {reading.message}; it waits until {until} or "
                f"`{self.dialect.delete} {name}` deletes it"
            )

    def _finish(
        self, task: Task, what: What, message: str, events: list[Event], *, retry: bool = True
    ) -> None:
        assert task.record
        log, since = self.records.path(task.record, "log"), self.records.submitted(task.record)
        self.records.drop(task.record, keep_files=what is What.FAILED)
        del self.tasks[task.key]
        name = task.record.active_name
        events.append(Event(what, task, name, message, log, since, retry))

    # -- finding again what an earlier controller submitted

    def _greet(self, task: Task, now: float, events: list[Event]) -> None:
        """First answers about a submission of an earlier controller: take it over, or not."""
        assert task.record
        evidence, record = task.evidence, task.record
        ours = record.fingerprint == task.fingerprint and not record.cancelled and bool(task.body)
        reading = evidence.reading if evidence.answered else None
        fresh = self.records.ended(record) >= self.started
        if record.bundled and evidence.exit_status is not None:
            # It has ended, whatever the rest of the bundle does.
            if ours and (evidence.exit_status == 0 or fresh):
                return self._take_over(task, reading, events)
            return self._renew(task)
        if reading and reading.active:
            if ours:
                return self._take_over(task, reading, events)
            return self._dismiss(task)
        written = evidence.exit_status is not None
        if reading and not evidence.agreed and not evidence.insisted(now, self.limits.patience):
            return None
        if reading is None and evidence.denials < REPEATS:
            return None
        succeeded = reading is None or reading.kind is Kind.SUCCEEDED
        if ours and succeeded and (fresh if written else reading is not None):
            # It ended after Snakemake had looked at its files.
            return self._take_over(task, reading, events)
        denied = now - evidence.denied_since
        silent = reading is None and not written and denied < self.limits.patience
        if silent and not self.records.give_up(record):
            return None  # it had begun, and PBS does not know it: perhaps wrongly
        return self._renew(task)

    def _take_over(self, task: Task, reading: Reading | None, events: list[Event]) -> None:
        assert task.record
        task.phase = Phase.WATCHED
        said = reading.message if reading else "finished"
        events.append(Event(What.SUBMITTED, task, task.record.active_name, f"found again, {said}"))

    def _dismiss(self, task: Task) -> None:
        """Have an earlier submission go, before another one makes the same files."""
        assert task.record
        task.phase = Phase.LEAVING
        if task.record.bundled and self.records.give_up(task.record):
            return self._renew(task)  # it has not begun, and the bundle will skip it
        for other in self.tasks.values():  # of the same bundle
            if other.record and other.record.job_id == task.record.job_id:
                other.phase = Phase.LEAVING
        self.tell(
            f"job {task.record.job_id} of an earlier run would make files of rule {task.rule} from "
            "something else, or was to be deleted: it is deleted, and a new one is submitted then"
        )
        return self._see_off(task, self.clock())

    def _see_off(self, task: Task, now: float) -> None:
        assert task.record
        evidence, patience = task.evidence, self.limits.patience
        ended = evidence.reading is not None and not evidence.reading.active
        if ended and (evidence.exit_status is not None or evidence.insisted(now, patience)):
            return self._renew(task)
        if not task.deletion_asked:
            task.deletion_asked = not self.server.delete([str(task.record.job_id)])
        began = not self.records.give_up(task.record)
        denied = evidence.denials >= REPEATS and now - evidence.denied_since >= patience
        if not began or denied:
            self._renew(task)
        return None

    def _renew(self, task: Task) -> None:
        """Forget the earlier submission, so that a new one may be made."""
        if task.record:
            self.records.drop(task.record, keep_files=True)
        task.record, task.evidence, task.deletion_asked = None, Evidence(), False
        task.phase = Phase.READY
        if not task.body:  # a leftover, which only stood in the way
            del self.tasks[task.key]

    def _find_all(self) -> None:
        """Look for what is to be found, those longest ago first, while the server answers."""
        finding = [task for task in self.tasks.values() if task.phase is Phase.FINDING]
        for task in sorted(finding, key=lambda task: task.not_before):
            if self.stopping() or self.clock() < task.not_before:
                return
            if not self._find(task):
                self._queues.rest(ANY, self.clock() + self.limits.interval)
                return

    def _find(self, task: Task, *, ask: bool = True) -> bool:
        """Look for the id of a submission that has none, and of its bundle; False: no answer."""
        assert task.record
        now, name = self.clock(), task.record.name
        together = [
            (each, each.record)
            for each in self.tasks.values()
            if each.phase is Phase.FINDING and each.record and each.record.name == name
        ]
        for each, _ in together:
            each.not_before = now + self.limits.interval
        claims = (self.records.claimed_by(record) for _, record in together)
        known = next((claim for claim in claims if claim and claim != GIVEN_UP), "")
        if not known and not ask:
            return False
        try:
            found = [known] if known else self.server.find(name)
        except Unreachable as error:
            if "unreachable" not in task.told:
                task.told.add("unreachable")
                self.tell(f"{name}: cannot be looked for yet: {error}")
            return False
        for each, record in together:
            if found:
                each.record = self.records.named(record, str(found[0]))
                each.phase = Phase.MEETING
            # qsub may have been cut off in the middle, or its request may still be under way.
            elif now - record.written >= self.limits.settling and self.records.give_up(record):
                self._renew(each)
        return True

    # -- submitting

    def _submit_all(self, events: list[Event]) -> None:
        self._queues.begin_round(self.tasks.values())
        submitted = 0
        ready = [task for task in self.tasks.values() if task.phase is Phase.READY]
        # Those that were not taken come after those that were not tried.
        ready.sort(key=lambda task: task.not_before)
        for task in ready:
            now, queue = self.clock(), task.request.queue
            if self.stopping() or (submitted and now >= self.next_poll):
                return
            if not self._is_due(task, now) or not self._queues.is_open(queue, now):
                continue
            together = [task]
            if self._queues.is_narrow(queue) and task.key not in self._alone:
                together += islice(self._companions(task, ready, now), MOST_BUNDLED - 1)
            self._submit(together, events)
            submitted += 1
            if task.record:
                self._queues.note_submitted(task)

    def _is_due(self, task: Task, now: float) -> bool:
        task.blockers &= self.tasks.keys()
        waits = task.phase is Phase.READY and self.tasks.get(task.key) is task
        return waits and not task.blockers and now >= task.not_before

    def _companions(self, task: Task, ready: Sequence[Task], now: float) -> Iterator[Task]:
        """Ready tasks that may share a job with a task."""
        for other in ready:
            alike = other is not task and are_alike(other, task) and other.key not in self._alone
            if alike and self._is_due(other, now):
                yield other

    def _submit(self, tasks: Sequence[Task], events: list[Event]) -> None:
        """Submit one job for a task, or for several of the same rule and request."""
        first, now = tasks[0], self.clock()
        path, arguments = prepare(tasks, self.records, self.dialect, self._progress, now)
        queue, submit = first.request.queue, self.dialect.submit
        try:
            job_id = self.server.submit(arguments, path)
        except Refused as error:
            for task in tasks:
                self._finish(task, What.FAILED, f"was refused by {submit}: {error}", events)
        except Later as error:
            # A limit, or no server: another job of this queue would meet the same.
            self._tell_once(queue, f"{submit}: {error}: it is tried again")
            for task in tasks:
                assert task.record
                self.records.discard(task.record)
                task.record, task.not_before = None, self.clock() + self.limits.interval
            self._queues.rest(queue, first.not_before)
        except Unsure as error:
            assert first.record
            self._tell_once(queue, f"{submit}: {error}: {first.record.name} is looked for")
            for task in tasks:
                task.phase, task.not_before = Phase.FINDING, now + self.limits.interval
            self._queues.rest(ANY, self.clock() + self.limits.interval)
        else:
            self._told_queues.discard(queue)
            for task in tasks:
                assert task.record
                task.record = self.records.named(task.record, job_id)
                task.phase = Phase.WATCHED
                events.append(Event(What.SUBMITTED, task, job_id))

    def _tell_once(self, queue: str, text: str) -> None:
        """Tell that a queue takes no jobs; again only after it has taken one."""
        if queue not in self._told_queues:
            self._told_queues.add(queue)
            self.tell(f"queue {queue}: {text}" if queue else text)

    # -- deleting

    def cancel(self, sleep: Callable[[float], object] = time.sleep) -> list[str]:
        """Delete all jobs; returns what went wrong. The next run meets those that run on."""
        own = [task for task in self.tasks.values() if task.record]
        wrong, answers = [], True
        for task in own:
            try:
                if task.phase is Phase.FINDING:
                    answers = self._find(task, ask=answers) and answers
                if task.record is None:  # it never came to be
                    continue
                record = replace(task.record, cancelled=True)
                self.records.write(record, lasting=False)  # qdel must not wait for disks
                # Those that have not begun do nothing from now on, even if PBS cannot be reached.
                if self.records.give_up(record) and not record.job_id:
                    self.records.drop(record)
            except OSError as error:
                wrong.append(f"{error.filename}: {error.strerror}")
        known = (task.record.job_id for task in own if task.record)
        ids = [*dict.fromkeys(job_id for job_id in known if job_id)]
        for chunk in chunks(ids, 200):
            for pause in (1, 2, 0):
                if not (message := self.server.delete(chunk)):
                    break
                sleep(pause)
            else:
                wrong.append(f"{self.dialect.delete} {' '.join(chunk)}: {message}")
        return wrong


def chunks(items: Sequence[str], size: int) -> Iterable[Sequence[str]]:
    """Cut a sequence into parts of at most a size."""
    return (items[start : start + size] for start in range(0, len(items), size))
