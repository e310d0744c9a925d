"""Jobs on their way through a simulated PBS that fails in every way: none twice, none lost."""

import itertools
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.commands import Unreachable, Unsure
from snakemake_executor_plugin_pbs.evidence import Belief, Evidence
from snakemake_executor_plugin_pbs.records import Record, Records
from snakemake_executor_plugin_pbs.replies import Answer
from snakemake_executor_plugin_pbs.request import Request
from snakemake_executor_plugin_pbs.states import Kind, Reading
from snakemake_executor_plugin_pbs.tasks import Event, Limits, Phase, Task, What
from snakemake_executor_plugin_pbs.tracker import CROWDED_SECONDS, Tracker
from tests.support.pbs_simulated import Faults, Killed, SimulatedServer

INTERVAL = 10.0


class Run:
    """A controller, and those that follow when it is killed; it plays Snakemake's part."""

    def __init__(self, folder: Path, server: SimulatedServer, names: list[str], **limits) -> None:
        self.records, self.server, self.names = Records(folder), server, names
        self.limits = Limits(interval=INTERVAL, settling=90.0, **limits)
        self.ended: dict[str, Event] = {}
        self.submitted: Counter[str] = Counter()
        self.told: list[str] = []
        self.kills = 0
        self.fingerprints: dict[str, str] = {}
        self.begin()

    def begin(self) -> None:
        """Start a controller, as Snakemake does for all jobs that have not ended."""
        self.tracker = Tracker(
            self.server, self.records, self.limits, tell=self.told.append, clock=self.server.clock
        )
        for name in self.names:
            if name not in self.ended:
                self.tracker.add(self.task(name))

    def see_files(self) -> None:
        """Leave out jobs whose files are there, as a new Snakemake does."""
        for job in self.server.jobs.values():
            name = job.name.partition(".")[0]
            if job.exit == 0 and job.substate == 92 and name not in self.ended:
                self.ended[name] = Event(What.SUCCEEDED, self.task(name))

    def task(self, name: str, outputs: tuple[str, ...] = ()) -> Task:
        queue = name.partition("@")[2].partition("#")[0]
        request = Request(("-q", queue) if queue else (), queue)
        outputs = outputs or (f"/out/{name}",)
        print_it = self.fingerprints.get(name, "made so")
        rule = name.partition("#")[0]
        return Task(f"k-{name}", rule, {}, request, "echo\n", outputs, print_it, job=name)

    def kill(self) -> None:
        """Kill the controller with -9; a new one starts at once."""
        self.kills += 1
        self.server.status_calls.append(None)  # the next one asks when it begins
        self.see_files()
        self.begin()

    def step(self, seconds: float = INTERVAL) -> list[Event]:
        """One round of the controller, and time for the jobs."""
        try:
            events = self.tracker.step()
        except Killed:
            self.kill()
            events = []
        for event in events:
            if event.what is What.SUBMITTED:
                self.submitted[event.task.job] += 1
            else:
                assert event.task.job not in self.ended
                self.ended[event.task.job] = event
        self.server.pass_time(seconds)
        return events

    def until(self, condition, rounds: int = 400) -> None:
        for _ in range(rounds):
            if condition():
                return
            self.step()
        raise AssertionError(f"not so after {rounds} rounds: {self.told[-3:]}")

    def until_all_ended(self, rounds: int = 400) -> None:
        self.until(lambda: len(self.ended) == len(self.names), rounds)

    def outcome(self, name: str) -> tuple[What, str]:
        return self.ended[name].what, self.ended[name].message


@pytest.fixture
def server() -> SimulatedServer:
    return SimulatedServer(random.Random(1))


def most_calls_an_interval(server: SimulatedServer) -> int:
    """The most calls of qstat that any time of one interval saw, of a single controller."""
    most, recent = 0, list[float]()
    for time in server.status_calls:
        recent = [] if time is None else [one for one in recent if time - one < INTERVAL] + [time]
        most = max(most, len(recent))
    return most


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is seen at once; no machine crashes here, and 10,000 fsyncs take minutes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.grid
@pytest.mark.slow
def test_ten_thousand_jobs_with_every_fault_are_done_once_each(tmp_path: Path) -> None:
    server = SimulatedServer(
        random.Random(7),
        Faults(
            silent=0.1, truncated=0.1, first=0.05, lying=0.1, lost=0.002, killed=0.001, full=0.001
        ),
        purge_after=60,
        failing={"bad"},
    )
    names = [f"{'bad' if place % 500 == 7 else 'good'}{place}" for place in range(10_000)]
    run = Run(tmp_path, server, names, patience=300.0)
    run.until_all_ended(rounds=1500)
    wrong = [
        name for name in names if (run.ended[name].what is What.FAILED) != name.startswith("bad")
    ]
    assert wrong == []
    # The work of each was done once (a new controller tries again what has failed), and no two did
    # the same at a time.
    work = Counter({path.name.removeprefix("k-"): times for path, times in server.done.items()})
    assert {name: work[name] for name in names if work[name] != 1 and name[0] == "g"} == {}
    assert all(1 <= work[name] <= 1 + run.kills for name in names if name[0] == "b")
    assert server.overlaps == 0
    assert run.kills > 3
    assert not any(job.state != "F" for job in server.jobs.values())
    assert most_calls_an_interval(server) == 1


def test_one_call_of_qstat_an_interval_whatever_the_number_of_jobs(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = Run(tmp_path, server, [f"j{place}" for place in range(250)], chunk=100)
    for _ in range(200):
        run.step(seconds=1.0)
    times = server.status_calls
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) > 15
    assert min(gaps) >= INTERVAL
    run.until_all_ended()


def test_a_server_that_is_down_for_hours_fails_no_job(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 200
    run = Run(tmp_path, server, ["a", "b"])
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    server.down = True
    server.seconds = 10**6
    long = max(server.jobs.values(), key=lambda job: job.begin + job.seconds)
    long.seconds = 10**5
    for _ in range(360):
        run.step()
    assert f"k-{long.name.partition('.')[0]}" in run.tracker.tasks
    assert all(event.what is What.SUCCEEDED for event in run.ended.values())
    assert sum("jobs go on" in text for text in run.told) == 1
    server.down, long.seconds = False, 1
    run.until_all_ended()
    assert all(event.what is What.SUCCEEDED for event in run.ended.values())


def test_a_submission_without_an_answer_is_looked_for_not_repeated(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.faults.lost = 1.0
    run = Run(tmp_path, server, [f"j{place}" for place in range(20)])
    run.step()
    assert len([task for task in run.tracker.tasks.values() if task.record]) == 1
    run.until(lambda: len(server.jobs) > 5)
    server.faults.lost = 0.0
    run.until_all_ended()
    assert len(server.jobs) == 20
    assert set(server.done.values()) == {1}


def test_a_full_queue_is_tried_once_an_interval_and_leaves_nothing(
    tmp_path: Path, server: SimulatedServer
) -> None:
    names = [f"j{place}@{queue}" for place in range(30) for queue in ("debug", "prod")]
    run = Run(tmp_path, server, names)
    server.faults.full = 1.0
    for _ in range(100):
        run.step()
    tries = Counter(queue for _, queue in server.submit_calls)
    assert tries == {"debug": 100, "prod": 100}
    assert not list(tmp_path.rglob("*.*"))
    # One of them may be what is too much, so that each has its turn.
    assert len({name for name, _ in server.submit_calls}) == len(names)
    assert [text for text in run.told if "would exceed" in text] == [
        f"queue {queue}: qsub: would exceed queue's limit: it is tried again"
        for queue in ("debug", "prod")
    ]
    server.faults.full = 0.0
    run.until_all_ended()
    assert set(server.done.values()) == {1}


class HangingServer(SimulatedServer):
    """Each call takes its whole time, and gives no answer."""

    hangs = False
    finds = 0

    def submit(self, arguments: Sequence[str], script: Path) -> str:
        if not self.hangs:
            return super().submit(arguments, script)
        self.now += 60
        raise Unsure("no answer in 60 s")

    def status(self, ids: Sequence[str]) -> Answer:
        self.now += 60 * self.hangs
        return Answer(fault="no answer in 60 s") if self.hangs else super().status(ids)

    def find(self, name: str) -> list[str]:
        self.finds += 1
        if self.hangs:
            self.now += 60
            raise Unreachable("no answer in 60 s")
        return super().find(name)


def test_a_server_that_hangs_is_asked_no_more_and_no_more(tmp_path: Path) -> None:
    server = HangingServer(random.Random(1), seconds=10**6)
    run = Run(tmp_path, server, ["a", "b"])
    run.until(lambda: [job.state for job in server.jobs.values()] == ["R", "R"])
    server.hangs = True
    for place in range(20):
        run.tracker.add(run.task(f"late{place}"))
    for _ in range(30):
        begin = server.now
        run.step(seconds=0.0)
        assert server.now - begin <= 180  # one call of each kind
    unsure = [task for task in run.tracker.tasks.values() if task.phase is Phase.FINDING]
    assert len(unsure) == 1
    begin, server.finds = server.now, 0
    assert run.tracker.cancel(sleep=lambda _: None) == []
    assert server.finds == 1
    assert server.now - begin == 60
    assert {job.state for job in server.jobs.values()} == {"F"}


def test_cancel_deletes_all_though_a_submission_never_came_to_be(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 10**6
    run = Run(tmp_path, server, ["a", "b", "c"])
    run.until(lambda: [job.state for job in server.jobs.values()] == ["R"] * 3)
    server.down = True
    run.tracker.add(run.task("never-there"))
    run.step()
    assert run.tracker.tasks["k-never-there"].phase is Phase.FINDING
    server.down = False
    server.now += 1000
    assert run.tracker.cancel() == []
    assert not any(job.state != "F" for job in server.jobs.values())


def test_cancel_deletes_all_though_the_disk_is_full(
    tmp_path: Path, server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.seconds = 10**6
    run = Run(tmp_path, server, ["a", "b"])
    run.until(lambda: [job.state for job in server.jobs.values()] == ["R", "R"])

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "record.json")

    monkeypatch.setattr(Records, "write", fail)
    assert run.tracker.cancel() == ["record.json: No space left on device"] * 2
    assert not any(job.state != "F" for job in server.jobs.values())


def test_a_job_that_waited_when_the_server_went_down_ends_by_its_own_word(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = Run(tmp_path, server, ["a"], patience=300.0)
    run.step(seconds=0.0)
    server.jobs[100].begin = server.now + 25
    run.step()
    run.step(seconds=0.0)
    assert run.tracker.tasks["k-a"].evidence.reading == Reading(Kind.WAITING, "queued")
    server.down = True
    run.until_all_ended(rounds=100)
    assert run.outcome("a")[0] is What.SUCCEEDED
    assert "by its own exit-status file" in run.outcome("a")[1]


def test_a_reply_that_has_none_of_the_jobs_is_told(
    tmp_path: Path, server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, server, ["a"])
    run.step()
    monkeypatch.setattr(server, "status", lambda _: Answer())
    for _ in range(10):
        run.step()
    assert run.told == ["qstat: its reply has none of the jobs; jobs go on, and it is asked again"]


def test_a_request_that_arrives_after_it_was_given_up_does_nothing(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.faults.lost = 1.0
    run = Run(tmp_path, server, ["late"])
    server.takes_lost = True
    run.step(seconds=0.0)
    [late] = server.jobs.values()
    late.held = True
    server.active.discard(late.number)  # not to be seen yet
    server.faults.lost = 0.0
    run.until(lambda: len(server.jobs) == 2)
    server.active.add(late.number)
    late.held = False
    run.until_all_ended()
    run.until(lambda: late.state == "F")
    assert late.idle
    assert set(server.done.values()) == {1}


def test_a_request_that_arrives_late_is_found(tmp_path: Path, server: SimulatedServer) -> None:
    server.faults.lost, server.takes_lost = 1.0, True
    run = Run(tmp_path, server, ["late"])
    run.step()
    [late] = server.jobs.values()
    server.active.discard(late.number)  # not to be seen yet
    server.faults.lost = 0.0
    for _ in range(5):
        run.step()
    server.active.add(late.number)
    run.until_all_ended()
    assert len(server.jobs) == 1


def test_running_jobs_are_found_again_after_kill_9(tmp_path: Path, server: SimulatedServer) -> None:
    run = Run(tmp_path, server, ["a", "b", "c"])
    server.seconds = 500
    run.until(lambda: Counter(job.state for job in server.jobs.values())["R"] >= 2)
    for _ in range(3):
        run.kill()
        run.step()
    run.until_all_ended()
    assert len(server.jobs) == 3
    assert {event.what for event in run.ended.values()} == {What.SUCCEEDED}
    assert not list(tmp_path.iterdir())  # nothing is left of jobs that are done


def test_a_job_that_ended_before_the_controller_began_is_done_again(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = Run(tmp_path, server, ["a"])
    run.step()
    server.pass_time(1000)  # nobody looks; Snakemake then wants it all the same
    [done] = server.done
    for path in done.glob("*.exit"):
        os.utime(path, (server.now - 500, server.now - 500))
    run.begin()
    run.until_all_ended()
    assert len(server.jobs) == 2


def test_a_job_that_ended_while_the_controller_began_counts(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = Run(tmp_path, server, ["a"])
    run.step()
    run.kill()
    server.pass_time(1000)
    run.until_all_ended()
    assert len(server.jobs) == 1
    assert run.outcome("a")[0] is What.SUCCEEDED


def test_a_job_of_other_inputs_goes_before_a_new_one_comes(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 500
    run = Run(tmp_path, server, ["a"])
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    run.fingerprints["a"] = "made otherwise"
    run.kill()
    run.until_all_ended()
    first, second = server.jobs.values()
    assert (first.substate, second.substate) == (91, 92)
    assert server.overlaps == 0
    assert any("made" in text or "something else" in text for text in run.told)


def test_a_group_that_was_cut_otherwise_goes_before_its_part_comes(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 500
    run = Run(tmp_path, server, [])
    run.tracker.add(run.task("whole", ("/out/1", "/out/2")))
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    run.begin()
    run.names = ["part"]
    run.tracker.add(run.task("part", ("/out/2",)))
    server.slow_to_delete = True
    for _ in range(20):
        run.step()
    assert len(server.jobs) == 1
    server.end(server.jobs[100], 91, 0)
    run.until_all_ended()
    assert len(server.jobs) == 2


@pytest.mark.parametrize(
    ("name", "what", "words"),
    [
        ("never", What.FAILED, "can never run: too large"),
        ("refused", What.FAILED, "was refused by qsub: Unauthorized Request"),
        ("bad", What.FAILED, "failed with exit status 1"),
        ("good", What.SUCCEEDED, "finished"),
    ],
)
def test_ends(tmp_path: Path, server: SimulatedServer, name: str, what: What, words: str) -> None:
    server.failing = {"bad"}
    run = Run(tmp_path, server, [name])
    run.until_all_ended()
    assert run.outcome(name)[0] is what
    assert words in run.outcome(name)[1]
    assert not any(job.state != "F" for job in server.jobs.values())


def test_a_held_job_waits_and_is_told_of_once(tmp_path: Path, server: SimulatedServer) -> None:
    run = Run(tmp_path, server, ["held"])
    for _ in range(100):
        run.step()
    assert not run.ended
    assert sum("held by a user" in text and "qrls 100.pbs01" in text for text in run.told) == 1
    server.jobs[100].held = False
    run.until_all_ended()
    assert run.outcome("held")[0] is What.SUCCEEDED


def test_qdel_is_a_failure_though_its_exit_status_is_0(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 10**6
    run = Run(tmp_path, server, ["a"])
    run.until(lambda: server.jobs and server.jobs[100].state == "R")
    server.delete(["100.pbs01"])
    assert server.jobs[100].exit == 0
    run.until_all_ended()
    assert run.outcome("a") == (What.FAILED, "was deleted while running")
    assert not run.ended["a"].retry


def test_a_lost_job_is_given_up_only_after_patience(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 10**6
    run = Run(tmp_path, server, ["a"])
    run.until(lambda: server.jobs and server.jobs[100].state == "R")
    server.jobs.clear()  # the server lost its data
    server.active.clear()
    begin = server.now
    run.until_all_ended()
    assert server.now - begin >= run.limits.patience
    assert "is lost" in run.outcome("a")[1]


def test_limits_of_queues_count_waiting_jobs(tmp_path: Path, server: SimulatedServer) -> None:
    names = [f"j{place}@{queue}" for queue in ("debug", "prod") for place in range(30)]
    run = Run(tmp_path, server, names, queued={"debug": 2, "*": 5})
    most: Counter[str] = Counter()

    def all_ended() -> bool:
        nonlocal most
        most |= Counter(job.queue for job in server.jobs.values() if job.state == "Q")
        return len(run.ended) == len(names)

    run.until(all_ended)
    assert most == {"debug": 2, "prod": 5}
    assert set(server.done.values()) == {1}


def test_cancel_deletes_all_and_the_next_run_meets_what_ran_on(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 500
    run = Run(tmp_path, server, ["a", "b", "c"])
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    server.down = True  # at the worst moment
    wrong = run.tracker.cancel(sleep=lambda _: None)
    assert "qdel 100.pbs01 101.pbs01 102.pbs01: Connection refused" in wrong
    server.down = False
    run.kill()
    run.until_all_ended()
    assert {event.what for event in run.ended.values()} == {What.SUCCEEDED}
    assert server.overlaps == 0
    assert set(server.done.values()) == {1}


def test_cancel_of_a_healthy_server_leaves_no_job(tmp_path: Path, server: SimulatedServer) -> None:
    run = Run(tmp_path, server, [f"j{place}" for place in range(500)])
    run.until(lambda: any(job.state == "R" for job in server.jobs.values()))
    assert run.tracker.cancel() == []
    assert not any(job.state != "F" for job in server.jobs.values())


def test_a_record_survives_being_cut_off_while_it_is_written(tmp_path: Path) -> None:
    records = Records(tmp_path)
    record = Record("t", "n.t", "k", ("/out",), "f")
    records.write(record)
    (tmp_path / "k" / "record.json.1234").write_text('{"token": "t2')
    assert list(records.load()) == [record]


def test_only_one_can_claim_a_submission(tmp_path: Path) -> None:
    records = Records(tmp_path)
    record = Record("t", "n.t", "k", (), "")
    records.write(record)
    records.path(record, "claim").symlink_to("7.pbs01")
    assert not records.give_up(record)
    assert records.claimed_by(record) == "7.pbs01"
    other = Record("u", "n.u", "k", (), "")
    assert records.give_up(other)
    assert records.give_up(other)
    with pytest.raises(FileExistsError):
        records.path(other, "claim").symlink_to("8.pbs01")


def test_a_job_that_has_begun_makes_room_before_the_server_is_asked(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = Run(tmp_path, server, ["a@debug", "b@debug"], queued={"debug": 1})
    run.step(0.0)
    server.jobs[100].begin = server.now + 2 * CROWDED_SECONDS
    for _ in range(3):
        assert run.tracker.wait_seconds() == CROWDED_SECONDS
        assert len(server.jobs) == 1
        run.step(CROWDED_SECONDS)
    assert len(server.jobs) == 2
    assert not server.status_calls
    run.step(0.0)
    assert run.tracker.wait_seconds() > CROWDED_SECONDS  # nothing waits for room any more


def together(count: int, queue: str = "debug") -> list[str]:
    """Names of jobs of one rule."""
    return [f"work@{queue}#{number}" for number in range(count)]


def test_in_a_queue_of_one_ready_jobs_of_a_rule_share_a_job(
    tmp_path: Path, server: SimulatedServer
) -> None:
    names = [*together(120), "other@debug", *together(3, "prod")]
    run = Run(tmp_path, server, names, queued={"debug": 1})
    run.until_all_ended(2000)
    assert {event.what for event in run.ended.values()} == {What.SUCCEEDED}
    assert set(server.done.values()) == {1}
    sizes = {(job.queue, job.name.partition(".")[0]): [] for job in server.jobs.values()}
    for job in server.jobs.values():
        sizes[job.queue, job.name.partition(".")[0]].append(len(job.members))
    assert sizes == {
        ("debug", "work_debug"): [100, 20],
        ("debug", "other_debug"): [1],
        ("prod", "work_prod"): [1, 1, 1],
    }
    assert not [*tmp_path.iterdir()]


def test_what_a_bundle_does_not_come_to_is_submitted_again(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.most_members = 4
    run = Run(tmp_path, server, together(10), queued={"debug": 1})
    run.until_all_ended()
    assert {event.what for event in run.ended.values()} == {What.SUCCEEDED}
    assert set(server.done.values()) == {1}
    assert [len(job.members) for job in server.jobs.values()] == [10, 6, 2]


def test_each_job_of_a_bundle_has_its_own_end(tmp_path: Path, server: SimulatedServer) -> None:
    server.failing = {"work"}
    run = Run(tmp_path, server, together(3), queued={"debug": 1})
    run.until_all_ended()
    assert {run.outcome(name) for name in together(3)} == {
        (What.FAILED, "failed with exit status 1")
    }


def test_a_bundle_that_a_person_deletes_fails_but_for_what_was_done(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = Run(tmp_path, server, together(5), queued={"debug": 1})
    run.until(lambda: len(server.done) == 2)
    server.delete(["100.pbs01"])
    run.until_all_ended()
    done = [run.outcome(name)[0] is What.SUCCEEDED for name in together(5)]
    assert done == [True, True, False, False, False]
    assert {run.outcome(name)[1] for name in together(5)[2:]} == {"was deleted while running"}
    assert not any(run.ended[name].retry for name in together(5)[2:])
    assert len(server.jobs) == 1


def test_a_bundle_is_found_again_after_kill_9(tmp_path: Path, server: SimulatedServer) -> None:
    run = Run(tmp_path, server, together(6), queued={"debug": 1})
    run.until(lambda: len(run.ended) == 2)
    run.begin()  # another controller, in place of the first
    run.until_all_ended()
    assert {event.what for event in run.ended.values()} == {What.SUCCEEDED}
    assert set(server.done.values()) == {1}
    assert len(server.jobs) == 1


def test_a_bundle_without_an_answer_is_found(tmp_path: Path, server: SimulatedServer) -> None:
    server.faults.lost, server.takes_lost = 1.0, True
    run = Run(tmp_path, server, together(4), queued={"debug": 1})
    run.step()
    server.faults.lost = 0.0
    run.until_all_ended()
    assert set(server.done.values()) == {1}
    assert len(server.jobs) == 1


def test_a_bundle_passes_over_a_job_whose_inputs_changed(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = Run(tmp_path, server, together(4), queued={"debug": 1})
    run.until(lambda: len(run.ended) == 1)
    run.fingerprints[together(4)[3]] = "made otherwise"
    run.begin()
    run.until_all_ended()
    assert {event.what for event in run.ended.values()} == {What.SUCCEEDED}
    assert set(server.done.values()) == {1}
    assert [len(job.members) for job in server.jobs.values()] == [4, 1]
    assert server.overlaps == 0


def test_a_running_job_of_a_bundle_whose_inputs_changed_ends_the_bundle(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 1000.0
    run = Run(tmp_path, server, together(3), queued={"debug": 1})
    run.until(lambda: bool(server.working))
    run.fingerprints[together(3)[0]] = "made otherwise"
    run.begin()
    run.until_all_ended(2000)
    assert {event.what for event in run.ended.values()} == {What.SUCCEEDED}
    assert set(server.done.values()) == {1}
    assert server.overlaps == 0
    assert server.jobs[100].substate == 91


def test_cancel_deletes_a_bundle_once(tmp_path: Path, server: SimulatedServer) -> None:
    run = Run(tmp_path, server, together(3), queued={"debug": 1})
    run.until(lambda: bool(server.working))
    deleted: list[Sequence[str]] = []
    server.delete = lambda ids: deleted.append(ids) or ""  # type: ignore[method-assign]
    assert run.tracker.cancel() == []
    assert deleted == [["100.pbs01"]]


def test_work_that_moves_forward_goes_on_without_a_failure(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.failing = {"train"}
    server.progress = ["saved at step 10", "saved at step 20", "saved at step 20"]
    run = Run(tmp_path, server, ["train"])
    run.until_all_ended()
    assert len(server.jobs) == 3
    assert [text for text in run.told if "a new job goes on" in text] == [
        f"job {number}.pbs01 of rule train failed with exit status 1; saved at step {step}; "
        "a new job goes on"
        for number, step in ((100, 10), (101, 20))
    ]
    words = "failed with exit status 1; saved at step 20, run Snakemake again to go on"
    assert run.outcome("train") == (What.FAILED, words)
    assert run.ended["train"].retry


def test_a_new_controller_knows_how_far_work_had_come(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.failing = {"train"}
    server.progress = ["saved at step 10", "saved at step 10"]
    run = Run(tmp_path, server, ["train"])
    run.until(lambda: len(server.jobs) == 2)
    run.begin()
    run.until_all_ended()
    assert len(server.jobs) == 2
    assert "saved at step 10, run Snakemake again" in run.outcome("train")[1]


def test_a_person_who_deletes_work_that_moved_forward_ends_it(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds, server.progress = 10**6, ["saved at step 10"]
    run = Run(tmp_path, server, ["train"])
    run.until(lambda: bool(server.working))
    server.delete(["100.pbs01"])
    run.until_all_ended()
    words = "was deleted while running; saved at step 10, run Snakemake again to go on"
    assert run.outcome("train") == (What.FAILED, words)
    assert not run.ended["train"].retry
    assert len(server.jobs) == 1


def test_a_bundle_that_has_begun_makes_room(tmp_path: Path, server: SimulatedServer) -> None:
    run = Run(tmp_path, server, [*together(3), "other@debug"], queued={"debug": 1})
    run.step(0.0)
    server.jobs[100].begin = server.now + CROWDED_SECONDS
    run.step(CROWDED_SECONDS)
    assert len(server.jobs) == 1
    run.step(0.0)
    assert [len(job.members) for job in server.jobs.values()] == [3, 1]
    assert not server.status_calls


def test_a_full_queue_is_looked_at_once_a_round(
    tmp_path: Path, server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, server, [f"j{n}@prod" for n in range(500)], queued={"prod": 20})
    run.step(0.0)
    looked: list[Record] = []
    monkeypatch.setattr(run.records, "claimed_by", lambda record: looked.append(record))
    run.step(0.0)
    assert len(looked) == 20


def test_without_history_what_a_bundle_does_not_come_to_is_submitted_again(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.most_members, server.purge_after = 2, 0.0
    run = Run(tmp_path, server, together(4), queued={"debug": 1})
    run.until_all_ended()
    assert {event.what for event in run.ended.values()} == {What.SUCCEEDED}
    assert set(server.done.values()) == {1}


def test_a_job_that_failed_in_a_bundle_is_tried_again_alone(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.failing = {"work"}
    run = Run(tmp_path, server, together(3), queued={"debug": 1})
    run.until_all_ended()
    server.failing = set()
    again = together(2)
    for name in again:  # as Snakemake's retries do
        del run.ended[name]
        run.tracker.add(run.task(name))
    run.names.append("work@debug#new")
    run.tracker.add(run.task("work@debug#new"))
    run.until_all_ended()
    assert [len(job.members) for job in server.jobs.values()] == [3, 1, 1, 1]


def test_a_new_controller_does_not_take_an_old_failure_in_a_bundle_for_a_new_one(
    tmp_path: Path, server: SimulatedServer
) -> None:
    run = Run(tmp_path, server, together(3), queued={"debug": 1})
    run.until(lambda: bool(server.working))
    record = run.tracker.tasks[f"k-{together(3)[0]}"].record
    assert record
    exit_file = run.records.path(record, "exit")
    run.until(exit_file.exists)
    exit_file.write_text("1\n")
    os.utime(exit_file, (server.now - 1, server.now - 1))
    run.begin()  # the person mended the cause and starts Snakemake again
    run.until_all_ended()
    assert {event.what for event in run.ended.values()} == {What.SUCCEEDED}
    assert server.overlaps == 0


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (Reading(Kind.DELETED, "was deleted while running"), "was deleted while running"),
        (Reading(Kind.FAILED, "used more than was asked for: walltime"), "walltime"),
        (Reading(Kind.SUCCEEDED, "finished"), "failed with exit status 75"),
    ],
)
def test_the_end_of_a_bundle_explains_how_the_job_that_it_was_at_ended(
    reading: Reading, words: str
) -> None:
    evidence = Evidence()
    evidence.note_reading(Reading(Kind.RUNNING, "ending"), 0.0)
    evidence.note_exit_status(75, 0.0)
    assert evidence.belief(10.0, 300.0, bundled=True)[0] is Belief.OPEN
    evidence.note_reading(reading, 20.0)
    belief, message = evidence.belief(20.0, 300.0, bundled=True)
    assert belief is Belief.FAILED
    assert words in message


def test_a_failure_in_a_bundle_that_goes_on_is_believed_after_a_while() -> None:
    evidence = Evidence()
    evidence.note_reading(Reading(Kind.RUNNING, "running"), 0.0)
    evidence.note_exit_status(7, 0.0)
    told = [evidence.belief(now, 300.0, bundled=True) for now in (59.0, 61.0)]
    assert told == [(Belief.OPEN, ""), (Belief.FAILED, "failed with exit status 7")]


def test_a_job_that_is_queued_again_has_no_exit_status(
    tmp_path: Path, server: SimulatedServer
) -> None:
    server.seconds = 10**6
    run = Run(tmp_path, server, ["a"])
    run.until(lambda: bool(server.working))
    task = run.tracker.tasks["k-a"]
    assert task.record
    run.records.path(task.record, "exit").write_text("143\n")
    run.step()
    assert task.evidence.exit_status == 143
    job = server.jobs[100]
    job.state, job.substate, job.begin = "Q", 10, server.now + 10**6
    run.step()
    assert task.evidence.exit_status is None
