"""A server of PBS in memory, with a clock of its own, whose jobs leave the files that real ones do.

It counts how often a job's work was done, and whether two did it at once.
"""

import random
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from snakemake_executor_plugin_pbs.commands import Later, Refused, Unreachable, Unsure
from snakemake_executor_plugin_pbs.replies import Answer, number, parse


class Killed(BaseException):
    """The controller was killed with -9 in the middle of a call."""


@dataclass
class Simulated:
    """One job of the server."""

    number: int
    name: str
    queue: str
    members: list[tuple[Path, str]]  # folder and token of each submission; a bundle has several
    begin: float  # of the member that works, or will be first
    seconds: float  # of each member
    status: int  # with which each will end
    at: int = 0  # the member that works
    state: str = "Q"
    held: bool = False
    never: bool = False
    comment: str = ""
    exit: int | None = None
    substate: int = 10
    ended: float = 0.0
    idle: bool = False  # whether it found its submission given up


@dataclass
class Faults:
    """How often what goes wrong, of all calls."""

    silent: float = 0.0  # qstat fails, hangs, or prints nothing
    truncated: float = 0.0
    first: float = 0.0  # qstat tells of the first job alone
    lying: float = 0.0  # qstat says of all jobs that they failed, finished, or are not known
    lost: float = 0.0  # qsub gives no answer; every second time the job is there
    killed: float = 0.0  # the controller dies in qsub; every second time the job is there
    full: float = 0.0


@dataclass
class SimulatedServer:
    """The server; `now` is its clock."""

    rng: random.Random
    faults: Faults = field(default_factory=Faults)
    now: float = 1.0e9
    seconds: float = 60.0  # of a job
    slots: int = 10**9
    purge_after: float = 1e9
    failing: set[str] = field(default_factory=set)  # names' beginnings
    jobs: dict[int, Simulated] = field(default_factory=dict)
    status_calls: list[float | None] = field(default_factory=list)
    submit_calls: list[tuple[str, str]] = field(default_factory=list)  # name, queue
    done: dict[Path, int] = field(default_factory=dict)  # how often the work of a folder was done
    working: dict[Path, int] = field(default_factory=dict)  # folder to the job that does it now
    overlaps: int = 0
    down: bool = False
    slow_to_delete: bool = False
    takes_lost: bool = False  # whether jobs of calls that fail are always there
    most_members: int = 10**9  # for how many members of a bundle there is time
    progress: list[str] = field(default_factory=list)  # what works note when they begin
    active: set[int] = field(default_factory=set)

    def clock(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Let time go on, and jobs with it."""
        self.now += seconds
        for one in sorted(self.active):
            self._advance(self.jobs[one])

    def _advance(self, job: Simulated) -> None:
        if job.state == "Q" and not job.held and not job.never and self.now >= job.begin:
            job.state, job.substate = "R", 42
            self._begin(job)
        while job.state == "R" and (job.idle or self.now >= job.begin + job.seconds):
            folder, token = job.members[job.at]
            if not job.idle:
                (folder / f"{token}.exit").write_text(f"{job.status}\n")
                self.done[folder] = self.done.get(folder, 0) + 1
                self.working.pop(folder, None)
                job.begin += job.seconds
            job.at += 1
            if job.at < min(len(job.members), self.most_members):
                self._begin(job)
            elif len(job.members) > 1:
                self.end(job, 92, 0)
            else:
                self.end(job, 93 if job.status or job.idle else 92, 90 if job.idle else job.status)

    def _begin(self, job: Simulated) -> None:
        folder, token = job.members[job.at]
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

    def end(self, job: Simulated, substate: int, status: int | None) -> None:
        job.state, job.substate, job.exit, job.ended = "F", substate, status, self.now
        for folder, _ in job.members:
            if self.working.get(folder) == job.number:
                del self.working[folder]
        self.active.discard(job.number)

    # -- what the tracker calls

    def submit(self, arguments: Sequence[str], script: Path) -> str:
        name = arguments[arguments.index("-N") + 1]
        queue = arguments[arguments.index("-q") + 1] if "-q" in arguments else ""
        self.submit_calls.append((name.rpartition(".")[0], queue))
        if self.down:
            raise Unsure("Connection refused")
        draw, faults = self.rng.random(), self.faults
        if draw < faults.full:
            raise Later("would exceed queue's limit")
        if name.startswith("refused"):
            raise Refused("Unauthorized Request (exit status 159)")
        draw = self.rng.random()
        there = self.takes_lost or self.rng.random() < 0.5
        if draw < faults.killed + faults.lost and not there:
            raise Killed if draw < faults.killed else Unsure("no answer in 60 s")
        job = Simulated(
            len(self.jobs) + 100, name, queue, _members(script.read_text()),
            begin=self.now + self.rng.random() * 100,
            seconds=self.seconds * (0.5 + self.rng.random()),
            status=int(any(name.startswith(start) for start in self.failing)),
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

    def status(self, ids: Sequence[str]) -> Answer:
        self.status_calls.append(self.now)
        draw, faults = self.rng.random(), self.faults
        if self.down or draw < faults.silent:
            return Answer(fault="no answer in 60 s")
        draw, rows, errors = self.rng.random(), [], ""
        lie = self.rng.choice(("failed", "finished", "unknown")) if draw < faults.lying else ""
        for one in ids:
            job = self.jobs.get(int(number(one)))
            purged = job and job.state == "F" and self.now > job.ended + self.purge_after
            if job is None or purged or lie == "unknown":
                errors += f"qstat: Unknown Job Id {one}\n"
            else:
                rows.append(_row(job, lie))
        if self.rng.random() < faults.first:
            rows = rows[:1]
        jobs = '\t"Jobs":\t{\n' + ",\n".join(rows) + "\n\t}\n" if rows else '\t"x":\t1\n'
        text = f'{{\n\t"timestamp":\t1,\n{jobs}}}\n'
        if self.rng.random() < faults.truncated:
            text = text[: self.rng.randrange(len(text))]
        return parse(153 if errors else 0, text, errors)

    def find(self, name: str) -> list[str]:
        if self.down:
            raise Unreachable("Connection refused")
        return [f"{one}.pbs01" for one in self.active if self.jobs[one].name == name]

    def delete(self, ids: Sequence[str]) -> str:
        if self.down:
            return "Connection refused"
        if self.slow_to_delete:
            return ""
        for one in ids:
            job = self.jobs.get(int(number(one)))
            if job and job.state != "F":
                self.end(job, 91, 0 if job.state == "R" else None)
        return ""


def _members(script: str) -> list[tuple[Path, str]]:
    """Folder and token of each submission of a script."""
    found = re.search(r"^(?:set --|work) (['/].*)$", script, re.MULTILINE)
    assert found
    words = shlex.split(found[1])
    return [(Path(folder), token) for folder, token in zip(words[::2], words[1::2], strict=True)]


def _row(job: Simulated, lie: str) -> str:
    told: dict[str, object] = {"job_state": "H" if job.held and job.state == "Q" else job.state}
    told |= {"substate": job.substate, "Hold_Types": "u" if job.held else "n"}
    if job.comment:
        told["comment"] = job.comment
    if job.exit is not None:
        told["Exit_status"] = job.exit
    if lie:
        told |= {"job_state": "F", "substate": 92, "Exit_status": int(lie == "failed")}
    lines = ",\n".join(
        f'\t\t\t"{key}":\t{value if isinstance(value, int) else chr(34) + str(value) + chr(34)}'
        for key, value in told.items()
    )
    return f'\t\t"{job.number}.pbs01":\t{{\n{lines}\n\t\t}}'
