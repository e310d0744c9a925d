"""Simulated PBS server in memory with its own clock. Its jobs write the files of real jobs.

It counts how often the work of each job was done, and how often two jobs did it at once.
"""

import random
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from snakemake_executor_plugin_pbs.base.commands import (
    Dialect,
    Later,
    Refused,
    StatusReply,
    Unreachable,
    Unsure,
    number,
)
from snakemake_executor_plugin_pbs.base.records import Records
from snakemake_executor_plugin_pbs.base.request import SubmitRequest
from snakemake_executor_plugin_pbs.base.session import Event, EventKind, Limits, Task
from snakemake_executor_plugin_pbs.base.tracker import Tracker
from snakemake_executor_plugin_pbs.commands import PBS, parse


class Killed(BaseException):
    """The controller was killed with SIGKILL during a call."""


@dataclass
class SimulatedJob:
    """A job of the server."""

    number: int
    name: str
    queue: str
    members: list[tuple[Path, str]]  # folder and token of each submission; a bundle has several
    start: float  # time at which the current member starts
    seconds: float  # duration of each member
    exit_status: int  # of each member
    current: int = 0  # index of the current member
    state: str = "Q"
    held: bool = False
    never: bool = False
    comment: str = ""
    exit: int | None = None
    substate: int = 10
    ended: float = 0.0
    idle: bool = False  # whether it did nothing since its submission was given up


@dataclass
class Faults:
    """Probabilities of faults per call."""

    silent: float = 0.0  # qstat fails, hangs, or prints nothing
    truncated: float = 0.0
    first: float = 0.0  # qstat reports only the first job
    lying: float = 0.0  # qstat reports all jobs as failed, finished, or unknown
    lost: float = 0.0  # qsub gives no answer; half of the jobs arrive
    killed: float = 0.0  # the controller dies in qsub; half of the jobs arrive
    full: float = 0.0  # qsub refuses the job because of a limit


@dataclass
class SimulatedServer:
    """The server; `now` is the time of its clock."""

    rng: random.Random
    faults: Faults = field(default_factory=Faults)
    now: float = 1.0e9
    seconds: float = 60.0  # average duration of a job
    slots: int = 10**9
    purge_after: float = 1e9
    failing: set[str] = field(default_factory=set)  # prefixes of names
    jobs: dict[int, SimulatedJob] = field(default_factory=dict)
    status_calls: list[float | None] = field(default_factory=list)
    submit_calls: list[tuple[str, str]] = field(default_factory=list)  # name, queue
    submit_options: list[Sequence[str]] = field(default_factory=list)
    done: dict[Path, int] = field(default_factory=dict)  # folder to how often its work was done
    working: dict[Path, int] = field(default_factory=dict)  # folder to the job that does its work
    overlaps: int = 0  # how often a job started work that another job was doing
    down: bool = False
    slow_to_delete: bool = False
    takes_lost: bool = False  # whether all jobs of failed calls arrive
    most_members: int = 10**9  # members of a bundle that it has time for
    faulty: list[str] = field(default_factory=list)  # hosts that members find faulty, in turn
    refuses_options: str = ""  # beginning of options with which it refuses jobs
    progress: list[str] = field(default_factory=list)  # lines that members write when they start
    active: set[int] = field(default_factory=set)  # numbers of jobs that have not ended

    def clock(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Advance the clock and the jobs."""
        self.now += seconds
        for job_number in sorted(self.active):
            self._advance(self.jobs[job_number])

    def _advance(self, job: SimulatedJob) -> None:
        if job.state == "Q" and not job.held and not job.never and self.now >= job.start:
            job.state, job.substate = "R", 42
            self._start(job)
        while job.state == "R" and (job.idle or self.now >= job.start + job.seconds):
            folder, token = job.members[job.current]
            if not job.idle:
                (folder / f"{token}.exit").write_text(f"{job.exit_status}\n")
                self.done[folder] = self.done.get(folder, 0) + 1
                self.working.pop(folder, None)
                job.start += job.seconds
            job.current += 1
            if job.current < min(len(job.members), self.most_members):
                self._start(job)
            elif len(job.members) > 1:
                self.end(job, 92, 0)
            else:
                self.end(
                    job,
                    93 if job.exit_status or job.idle else 92,
                    90 if job.idle else job.exit_status,
                )

    def _start(self, job: SimulatedJob) -> None:
        folder, token = job.members[job.current]
        job.idle = False
        try:
            (folder / f"{token}.claim").symlink_to(f"{job.number}.pbs01")
        except OSError:
            job.idle = True
            return
        record = folder / "record.json"
        if not record.exists() or token not in record.read_text():
            job.idle = True
            return
        self.overlaps += folder in self.working
        self.working[folder] = job.number
        if self.progress:
            (folder / f"{token}.progress").write_text(f"{self.progress.pop(0)}\n")
        if self.faulty:
            (folder / f"{token}.faulty").write_text(f"{self.faulty.pop(0)}\n")

    def end(self, job: SimulatedJob, substate: int, status: int | None) -> None:
        job.state, job.substate, job.exit, job.ended = "F", substate, status, self.now
        for folder, _ in job.members:
            if self.working.get(folder) == job.number:
                del self.working[folder]
        self.active.discard(job.number)

    # -- the tracker's interface

    def submit(self, arguments: Sequence[str], script: Path) -> str:
        name = arguments[arguments.index("-N") + 1]
        queue = arguments[arguments.index("-q") + 1] if "-q" in arguments else ""
        self.submit_calls.append((name.rpartition(".")[0], queue))
        self.submit_options.append(arguments)
        if self.down:
            raise Unsure("Connection refused")
        if self.refuses_options and any(a.startswith(self.refuses_options) for a in arguments):
            raise Refused("not available")
        draw, faults = self.rng.random(), self.faults
        if draw < faults.full:
            raise Later("would exceed queue's limit")
        if name.startswith("refused"):
            raise Refused("Unauthorized Request (exit status 159)")
        draw = self.rng.random()
        arrives = self.takes_lost or self.rng.random() < 0.5
        if draw < faults.killed + faults.lost and not arrives:
            raise Killed if draw < faults.killed else Unsure("no answer in 60 s")
        job = SimulatedJob(
            len(self.jobs) + 100, name, queue, _members(script.read_text()),
            start=self.now + self.rng.random() * 100,
            seconds=self.seconds * (0.5 + self.rng.random()),
            exit_status=int(any(name.startswith(prefix) for prefix in self.failing)),
            held=name.startswith("held"), never=name.startswith("never"),
            comment="Can Never Run: too large" if name.startswith("never") else "",
        )  # fmt: skip
        self.jobs[job.number] = job
        self.active.add(job.number)
        if draw < faults.killed:
            raise Killed
        if draw < faults.killed + faults.lost:
            raise Unsure("no answer in 60 s")
        return f"{job.number}.pbs01"

    def status(self, ids: Sequence[str]) -> StatusReply:
        self.status_calls.append(self.now)
        draw, faults = self.rng.random(), self.faults
        if self.down or draw < faults.silent:
            return StatusReply(fault="no answer in 60 s")
        draw, rows, errors = self.rng.random(), [], ""
        lie = self.rng.choice(("failed", "finished", "unknown")) if draw < faults.lying else ""
        for job_id in ids:
            job = self.jobs.get(int(number(job_id)))
            purged = job and job.state == "F" and self.now > job.ended + self.purge_after
            if job is None or purged or lie == "unknown":
                errors += f"qstat: Unknown Job Id {job_id}\n"
            else:
                rows.append(_row(job, lie))
        if self.rng.random() < faults.first:
            rows = rows[:1]
        jobs = '\t"Jobs":\t{\n' + ",\n".join(rows) + "\n\t}\n" if rows else '\t"x":\t1\n'
        text = f'{{\n\t"timestamp":\t1,\n{jobs}}}\n'
        if self.rng.random() < faults.truncated:
            text = text[: self.rng.randrange(len(text))]
        return parse(153 if errors else 0, text, errors=errors)

    def find(self, name: str) -> list[str]:
        if self.down:
            raise Unreachable("Connection refused")
        jobs = (self.jobs[each] for each in self.active)
        return [f"{job.number}.pbs01" for job in jobs if job.name == name]

    def delete(self, ids: Sequence[str]) -> str:
        if self.down:
            return "Connection refused"
        if self.slow_to_delete:
            return ""
        for job_id in ids:
            job = self.jobs.get(int(number(job_id)))
            if job and job.state != "F":
                self.end(job, 91, 0 if job.state == "R" else None)
        return ""


def _members(script: str) -> list[tuple[Path, str]]:
    """Folder and token of each submission in a script."""
    match = re.search(r"^members=\((.*)\)", script, re.MULTILINE)
    assert match
    words = shlex.split(match[1])
    return [(Path(folder), token) for folder, token in zip(words[::2], words[1::2], strict=True)]


def _row(job: SimulatedJob, lie: str) -> str:
    attributes: dict[str, object] = {
        "job_state": "H" if job.held and job.state == "Q" else job.state
    }
    attributes |= {"substate": job.substate, "Hold_Types": "u" if job.held else "n"}
    attributes["Job_Name"] = job.name
    if job.comment:
        attributes["comment"] = job.comment
    if job.exit is not None:
        attributes["Exit_status"] = job.exit
    if lie:
        attributes |= {"job_state": "F", "substate": 92, "Exit_status": int(lie == "failed")}
    lines = ",\n".join(
        f'\t\t\t"{key}":\t{value if isinstance(value, int) else chr(34) + str(value) + chr(34)}'
        for key, value in attributes.items()
    )
    return f'\t\t"{job.number}.pbs01":\t{{\n{lines}\n\t\t}}'


INTERVAL = 10.0


class SimulatedRun:
    """A controller, and its successors after each kill.

    A job `rule@queue#number` has that queue; jobs with the same text before `#` have the same rule.
    """

    def __init__(
        self,
        folder: Path,
        server: SimulatedServer,
        names: list[str],
        *,
        dialect: Dialect = PBS,
        **limits,
    ) -> None:
        self.dialect = dialect
        self.records, self.server, self.names = Records(folder), server, names
        self.limits = Limits(interval=INTERVAL, settling=90.0, **limits)
        self.ended: dict[str, Event] = {}
        self.submitted: Counter[str] = Counter()
        self.warnings: list[str] = []
        self.num_kills = 0
        self.fingerprints: dict[str, str] = {}
        self.start()

    def start(self) -> None:
        """Start a controller with all jobs that have not ended."""
        self.tracker = Tracker(
            self.server,
            self.records,
            limits=self.limits,
            warn=self.warnings.append,
            clock=self.server.clock,
            dialect=self.dialect,
        )
        for name in self.names:
            if name not in self.ended:
                self.tracker.add(self.task(name))

    def find_outputs(self) -> None:
        """Leave out jobs whose outputs exist, as a new Snakemake does."""
        for job in self.server.jobs.values():
            name = job.name.partition(".")[0]
            if job.exit == 0 and job.substate == 92 and name not in self.ended:
                self.ended[name] = Event(EventKind.SUCCEEDED, self.task(name))

    def task(self, name: str, outputs: tuple[str, ...] = ()) -> Task:
        """Task of a job."""
        queue = name.partition("@")[2].partition("#")[0]
        request = SubmitRequest(("-q", queue) if queue else (), queue)
        outputs = outputs or (f"/out/{name}",)
        fingerprint = self.fingerprints.get(name, "first inputs")
        rule = name.partition("#")[0]
        return Task(f"k-{name}", rule, {}, request, "echo\n", outputs, fingerprint, job=name)

    def kill(self) -> None:
        """Kill the controller with SIGKILL and start a new one."""
        self.num_kills += 1
        self.server.status_calls.append(None)  # the new controller polls when it starts
        self.find_outputs()
        self.start()

    def step(self, seconds: float = INTERVAL) -> list[Event]:
        """Do one step of the controller, then let time pass for the jobs."""
        try:
            events = self.tracker.step()
        except Killed:
            self.kill()
            events = []
        for event in events:
            if event.kind is EventKind.SUBMITTED:
                self.submitted[event.task.job] += 1
            else:
                assert event.task.job not in self.ended
                self.ended[event.task.job] = event
        self.server.pass_time(seconds)
        return events

    def until(self, condition: Callable[[], object], rounds: int = 400) -> None:
        """Do steps until a condition holds."""
        for _ in range(rounds):
            if condition():
                return
            self.step()
        raise AssertionError(f"not true after {rounds} rounds: {self.warnings[-3:]}")

    def until_all_ended(self, rounds: int = 400) -> None:
        """Do steps until all jobs have ended."""
        self.until(lambda: len(self.ended) == len(self.names), rounds)

    def outcome(self, name: str) -> tuple[EventKind, str]:
        """Last event of a job and its message."""
        return self.ended[name].kind, self.ended[name].message


def same_rule(count: int, queue: str = "debug") -> list[str]:
    """Names of jobs of one rule."""
    return [f"work@{queue}#{number}" for number in range(count)]
