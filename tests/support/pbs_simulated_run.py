"""Run of a workflow on the simulated PBS: this class plays Snakemake's part for the tracker."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from snakemake_executor_plugin_pbs.base.commands import Dialect
from snakemake_executor_plugin_pbs.base.records import Records
from snakemake_executor_plugin_pbs.base.request import SubmitRequest
from snakemake_executor_plugin_pbs.base.session import Event, EventKind, Limits, Task
from snakemake_executor_plugin_pbs.base.tracker import Tracker
from snakemake_executor_plugin_pbs.commands import PBS
from tests.support.pbs_simulated import Killed, SimulatedServer

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
