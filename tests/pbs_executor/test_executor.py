"""Snakemake with the PBS executor: real jobs on the stand-in, and on a real PBS on request.

`pytest -m pbs tests/pbs_executor/test_executor.py` runs the same tests on the PBS of this machine,
with the values of ~/.config/snakemake/pbs.yaml. Without -m pbs they are skipped.
"""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from snakemake.common.tests import TestWorkflowsLocalStorageBase

from snakemake_executor_plugin_pbs import ExecutorSettings
from tests.support.pbs_servers import (
    OWN_FILE,
    REAL,
    REAL_DEADLINE,
    Controller,
    Pbs,
    RealPbs,
    real,
    stand_in,
    wait_for,
)
from tests.support.programs import programs

pytestmark = pytest.mark.slow

SERVERS = [
    "stand-in",
    pytest.param(
        "real",
        marks=[pytest.mark.pbs, pytest.mark.skipif(REAL is None, reason="no qsub on this machine")],
    ),
]

SNAKEFILE = """
rule all:
    input: expand("out/{n}", n=range(config.get("number", 3)))

rule work:
    input: "go"
    output: "out/{n}"
    log: "logs/{n}"
    shell:
        "echo $PBS_JOBID >> started.{wildcards.n}; "
        "while [ ! -s go ]; do sleep 0.05; done; "
        "echo {wildcards.n} > {output}"

rule fail:
    output: "failed"
    shell: "echo the reason; exit 7"

rule slow:
    output: "slow"
    resources: pbs_extra="-l walltime=00:00:03"
    shell: "sleep 60; touch {output}"

rule large:
    output: "large"
    resources: ncpus=999
    shell: "touch {output}"

rule flaky:
    output: "flaky"
    retries: 2
    shell: "echo >> tries; [ $(wc -l < tries) -gt 1 ] && touch {output}"
"""
SNAKEFILE += f"""
rule mistaken:
    output: "mistaken"
    shell: "echo >> mistakes; {sys.executable} -m tokamake merge none --output pair"

rule killed:
    output: "killed"
    shell: "echo >> kills; [ $(wc -l < kills) -gt 2 ] || kill -9 $$; touch {{output}}"
"""


class TestInterface(TestWorkflowsLocalStorageBase):
    """Tests of Snakemake's executor interface."""

    __test__ = True

    @pytest.fixture(autouse=True, params=SERVERS)
    def commands(self, request, tmp_path_factory: pytest.TempPathFactory, monkeypatch):  # type: ignore[no-untyped-def]
        self.user_file = str(OWN_FILE)
        if request.param == "stand-in":
            server = stand_in(tmp_path_factory.mktemp("pbs") / "server")
            monkeypatch.setenv("PATH", server.environment["PATH"])
            monkeypatch.setattr(sys, "executable", str(programs("snakemake") / "job-python"))
            self.user_file = "none.yaml"
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        yield
        signal.signal(signal.SIGINT, handlers[0])
        signal.signal(signal.SIGTERM, handlers[1])

    def get_executor(self) -> str:
        return "pbs"

    def get_executor_settings(self) -> ExecutorSettings:
        return ExecutorSettings(user_file=self.user_file)

    @pytest.mark.grid
    def test_group_workflow(self, tmp_path: Path) -> None:
        super().test_group_workflow(tmp_path)


@pytest.fixture(params=SERVERS)
def pbs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Iterator[Pbs]:
    if request.param == "real":
        monkeypatch.setattr("tests.support.pbs_servers.DEADLINE", REAL_DEADLINE)
        server = real(tmp_path / "server", Path(str(REAL)).parent)
    else:
        server = stand_in(tmp_path / "server")
    yield server
    server.stop()


@pytest.fixture
def folder(tmp_path: Path, pbs: Pbs) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "Snakefile").write_text(SNAKEFILE)
    (work / "go").touch()
    (work / "pbs.yaml").write_text(pbs.values)
    return work


@pytest.fixture
def start(folder: Path, pbs: Pbs) -> Iterator[Callable[..., Controller]]:
    """Start controllers; those that still run at the end are killed."""
    controllers = []

    def start_controller(*arguments: str) -> Controller:
        patience = ("--pbs-patience", str(pbs.patience), "--pbs-command-timeout", "5")
        controllers.append(Controller(folder, pbs.environment, *patience, *arguments))
        return controllers[-1]

    yield start_controller
    for controller in controllers:
        if controller.process.poll() is None:
            controller.signal(signal.SIGKILL)
            controller.process.wait()


def started(folder: Path) -> dict[str, list[str]]:
    """Number of each Snakemake job to the ids of the PBS jobs that ran it."""
    return {
        path.name.partition(".")[2]: path.read_text().split() for path in folder.glob("started.*")
    }


def test_each_end_has_its_own_message(folder: Path, pbs: Pbs, start) -> None:
    controller = start("--keep-going", "--show-failed-logs", "failed", "slow", "large")
    assert controller.wait() == 1
    for words in (
        "failed with exit status 1",  # of Snakemake in the job; that of the rule is in the log
        "killed by PBS: walltime; raise runtime",
        "can never run: Insufficient amount of resource: ncpus (R: 999 A: ",
        "the reason",
    ):
        assert words in controller.text, controller.text
    assert all(job["state"] == "F" for job in pbs.jobs())


@pytest.mark.grid
def test_a_failed_job_is_retried(folder: Path, pbs: Pbs, start) -> None:
    controller = start("flaky")
    assert controller.wait() == 0, controller.text
    assert (folder / "tries").read_text().count("\n") == 2
    assert not list((folder / ".snakemake/pbs").iterdir())


def test_a_users_mistake_is_not_retried_and_a_signal_is(folder: Path, pbs: Pbs, start) -> None:
    controller = start("--retries", "2", "--keep-going", "mistaken", "killed")
    assert controller.wait() == 1
    assert (folder / "killed").exists(), controller.text
    assert (folder / "kills").read_text().count("\n") == 3
    assert (folder / "mistakes").read_text().count("\n") == 1
    assert len(pbs.jobs()) == 4
    assert "a retry would fail in the same way, so there is none" in controller.text


@pytest.mark.grid
def test_jobs_survive_every_fault_of_qstat(folder: Path, pbs: Pbs, start) -> None:
    pbs.faults(
        "qstat", "down", "hang", "empty", "truncated", "malformed", "first", "lie-failed",
        "forgetful", "lie-finished", "down", "malformed", "lie-failed", "first", "truncated",
    )  # fmt: skip
    controller = start("--pbs-command-timeout", "1")
    wait_for(lambda: len(pbs.calls("qstat")) > 9 and len(started(folder)) == 3, "calls of qstat")
    (folder / "go").write_text("go")
    assert controller.wait() == 0, controller.text
    assert {name: len(ids) for name, ids in started(folder).items()} == dict.fromkeys("012", 1)
    # One call per interval, and a second one for ids that the first one omitted.
    times = [when for when, _ in pbs.calls("qstat")]
    assert min(later - earlier for earlier, later in zip(times, times[2:], strict=False)) > 0.9


@pytest.mark.grid
def test_jobs_of_a_server_without_history_succeed_or_fail(folder: Path, pbs: Pbs, start) -> None:
    if isinstance(pbs, RealPbs):
        pytest.skip(
            "only administrators can disable the history of a server; the stand-in has none"
        )
    pbs.set(history=False)
    controller = start("--keep-going", "out/0", "failed", "slow")
    wait_for(lambda: len(started(folder)) == 1, "the job to start")
    (folder / "go").write_text("go")
    assert controller.wait() == 1
    assert "out/0" in {str(path.relative_to(folder)) for path in folder.glob("out/*")}
    # At the walltime, the job may write 1 or the signal's status, or be killed before it writes. A
    # walltime in `pbs_extra` is unknown to the executor: TERM long before `runtime` is a deletion.
    statuses = re.findall(
        r"failed with exit status (\d+), according to its exit-status file", controller.text
    )
    assert "1" in statuses
    others = ("is lost", "was deleted while running")
    assert len(statuses) == 2 or any(each in controller.text for each in others), controller.text
    options = ["-x" in arguments for _, arguments in pbs.calls("qstat")]
    assert options == [True, *[False] * (len(options) - 1)]


@pytest.mark.grid
@pytest.mark.fault("kill of the controller")
def test_a_new_controller_after_kill_9_submits_no_job_twice(folder: Path, pbs: Pbs, start) -> None:
    pbs.set(slots=2)  # two run, one waits
    controller = start()
    wait_for(lambda: len(started(folder)) == 2 and len(pbs.jobs()) == 3, "two jobs to start")
    for _ in range(2):
        controller.signal(signal.SIGKILL)
        controller.process.wait()
        controller = start("--nolock", "--rerun-incomplete")
        wait_for(lambda log=controller: log.text.count("found again") == 3, "jobs to be found")
    (folder / "go").write_text("go")
    assert controller.wait() == 0, controller.text
    assert len(pbs.jobs()) == 3
    assert {name: len(ids) for name, ids in started(folder).items()} == dict.fromkeys("012", 1)


@pytest.mark.grid
@pytest.mark.fault("kill of the controller")
def test_kill_9_between_qsub_and_its_answer_loses_no_job(folder: Path, pbs: Pbs, start) -> None:
    pbs.faults("qsub", "slow")  # the server has the job, but the answer is missing
    controller = start("--pbs-command-timeout", "600")
    wait_for(lambda: started(folder), "the job to start")
    controller.signal(signal.SIGKILL)
    controller.process.wait()
    # The same with a job that waits, so that it has not written its id.
    pbs.set(slots=0)
    pbs.faults("qsub", "slow")
    controller = start("--nolock", "--pbs-command-timeout", "600")
    wait_for(lambda: len(pbs.jobs()) == 2, "the second job")
    controller.signal(signal.SIGKILL)
    controller.process.wait()
    pbs.set(slots=8)
    controller = start("--nolock")
    wait_for(lambda: controller.text.count("found again") == 2, "jobs to be found")
    (folder / "go").write_text("go")
    assert controller.wait() == 0, controller.text
    assert len(pbs.jobs()) == 3
    assert {name: len(ids) for name, ids in started(folder).items()} == dict.fromkeys("012", 1)


@pytest.mark.grid
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.grid)]
)
def test_signals_delete_all_jobs_at_once(
    folder: Path, pbs: Pbs, start, number: signal.Signals
) -> None:
    pbs.set(slots=2)
    controller = start("--pbs-command-timeout", "600")
    wait_for(lambda: len(started(folder)) == 2 and len(pbs.jobs()) == 3, "two jobs to start")
    pbs.faults("qstat", "hang")  # for ten minutes; the controller does not wait for it
    calls = len(pbs.calls("qstat"))
    wait_for(lambda: len(pbs.calls("qstat")) > calls, "qstat to hang")
    controller.signal(number)
    assert controller.wait() == 1
    wait_for(lambda: all(job["state"] == "F" for job in pbs.jobs()), "jobs to end")
    assert {job["substate"] for job in pbs.jobs()} == {91}
    assert "Error in rule" not in controller.text
    if number == signal.SIGINT:
        return
    # A new controller can start at once.
    (folder / "go").write_text("go")
    assert start("--rerun-incomplete").wait() == 0


@pytest.mark.grid
def test_a_user_error_is_one_line_before_any_submission(folder: Path, pbs: Pbs, start) -> None:
    (folder / "pbs.yaml").unlink()
    controller = start("--pbs-required", "account queue")
    assert controller.wait() == 1
    lines = controller.text.splitlines()
    (message,) = (line for line in lines if "which this site requires" in line)
    assert message.startswith(
        f"Error: {folder}/pbs.yaml: no account, queue, which this site requires"
    )
    assert "executor.py" not in controller.text
    assert not pbs.jobs()
    values = yaml.safe_load(pbs.values) or {}
    (folder / "pbs.yaml").write_text(pbs.values)
    (folder / "go").write_text("go")
    assert start("--pbs-required", " ".join({"account", "queue"} & values.keys())).wait() == 0
    for job in pbs.jobs():
        assert {
            name: job[name] for name in {"account", "queue"} & values.keys()
        }.items() <= values.items()


@pytest.mark.grid
def test_a_refusal_is_reported_and_a_full_queue_is_retried(folder: Path, pbs: Pbs, start) -> None:
    (folder / "pbs.yaml").write_text("queue: none\n")
    patient = ("--pbs-command-timeout", "600")  # on a busy machine, qsub can take seconds
    controller = start(*patient)
    assert controller.wait() == 1
    assert "was refused by qsub: Unknown queue (exit status 170)" in controller.text
    (folder / "pbs.yaml").write_text(pbs.values)
    (folder / "go").write_text("go")
    pbs.faults("qsub", "full", "down", "full")
    controller = start(*patient)
    assert controller.wait() == 0, controller.text
    assert len(pbs.jobs()) == 3
