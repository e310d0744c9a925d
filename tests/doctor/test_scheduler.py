"""Checks of PBS and Slurm: answers, queues, accounts and limits."""

from pathlib import Path

import pytest

from tests.doctor.conftest import QUEUES, program, read, time_out
from tokamake.doctor import scheduler
from tokamake.doctor.profile import Profile, ResourceRequest
from tokamake.doctor.scheduler import Queue

PARTITIONS = """\
PartitionName=short AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES MaxNodes=UNLIMITED \
MaxTime=01:00:00 MinNodes=0 State=UP TotalCPUs=4
PartitionName=long AllowGroups=ALL AllowAccounts=physics,biology Default=NO MaxNodes=4 \
MaxTime=2-00:00:00 MinNodes=1 State=DRAIN
"""


def test_pbs_is_queried_once(site: Path) -> None:
    results = scheduler.check_scheduler(read(site))
    assert [result.line for result in results] == [
        "ok       scheduler: qstat answers, 6 queues",
        "ok       account is valid: not known: the scheduler checks it only at submission",
        "ok       limits for train: 2 nodes, 60 min in debug; at most 2 nodes, at most 60 min",
        "ok       limits for other rules: 1 node, 60 min in debug; at most 2 nodes, at most 60 min",
    ]
    assert (site / "qstat.calls").read_text() == "-Q -f -F json\n"
    assert not (site / "qsub.calls").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo cannot connect >&2; exit 111", "qstat: cannot connect (exit status 111)"),
        ("sleep 600", "qstat: no answer within 240 s"),
        ("echo '{\"Queue\":'", "qstat: the answer contains no queue"),
    ],
)
def test_a_scheduler_that_does_not_answer_is_reported(
    site: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(site, "qstat", text)
    if "sleep" in text:
        time_out(monkeypatch, site / "qstat.calls")
    (result,) = scheduler.check_scheduler(read(site), seconds=240)
    assert (result.state, result.value) == ("wrong", message)
    assert len((site / "qstat.calls").read_text().splitlines()) == 1


def test_a_machine_without_the_schedulers_commands(site: Path) -> None:
    (site / "bin/qdel").unlink()
    (result,) = scheduler.check_scheduler(read(site))
    assert (result.state, result.value) == ("wrong", "no qdel found")


@pytest.mark.parametrize(
    ("queue", "nodes", "minutes", "state", "message"),
    [
        ("debug", 2, 60, "ok", "at most 2 nodes"),
        ("debug", 3, 60, "wrong", "which allows at most 2 nodes"),
        ("debug", 2, 61, "wrong", "which allows at most 60 min"),
        ("small", 2, 60, "wrong", "which requires at least 10 nodes"),
        ("small", 20, 60, "ok", "nodes: limit not known"),
        ("prod", 20, 60, "ok", "at most 1440 min"),
        ("prod", 20, 1440, "wrong", "which allows at most 360 min"),
        ("none", 1, 1, "wrong", "none: no such queue (queues are closed, debug"),
        ("closed", 1, 1, "wrong", "accepts no jobs now"),
        ("stopped", 1, 1, "warning", "starts no jobs now"),
        ("", 1, 1, "ok", "not known: no queue is set"),
    ],
)
def test_limits_of_queues(queue: str, nodes: int, minutes: int, state: str, message: str) -> None:
    result = scheduler.request_result(ResourceRequest("train", nodes, minutes, queue), QUEUES)
    assert result.state == state, result.line
    assert message in result.line


def test_requests_are_compared_with_partitions_of_slurm() -> None:
    partitions = scheduler.slurm_partitions(PARTITIONS)
    assert partitions == {
        "short": Queue(
            "short", default=True, max_nodes=float("inf"), min_nodes=0, max_minutes=60
        ),
        "long": Queue(
            "long", open=False, runs=False, max_nodes=4, min_nodes=1, max_minutes=2880,
            allowed=("physics", "biology"),
        ),
    }  # fmt: skip
    result = scheduler.request_result(ResourceRequest("train", 9, 30, ""), partitions)
    assert result.value == "9 nodes, 30 min in short; any number of nodes, at most 60 min"
    assert scheduler.partition_account_fault("physics", "long", queues=partitions) is None
    assert scheduler.partition_account_fault("Physics", "long", queues=partitions) is None
    refused = scheduler.partition_account_fault("arts", "long", queues=partitions)
    assert refused is not None
    assert refused.remedy == "it accepts physics, biology"


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        ("echo physics; echo biology", "ok", "physics"),
        ("echo arts", "wrong", "physics: not your account"),
        ("echo no slurmdbd >&2; exit 1", "ok", "not known: sacctmgr: no slurmdbd"),
    ],
)
def test_accounts_are_compared_with_those_of_slurm(
    site: Path, answer: str, state: str, message: str
) -> None:
    for name in ("sbatch", "squeue", "scancel", "srun"):
        program(site, name, "")
    program(site, "scontrol", f"cat <<'END'\n{PARTITIONS}END")
    program(site, "sacctmgr", answer)
    (site / "site/profile.yaml").write_text(
        f"executor: sbatch\nsbatch-user-file: {site}/mine.yaml\nsbatch-defaults: partition=short\n"
        "default-resources:\n  launch: \"'site/launch.sh'\"\n"
    )
    (site / "mine.yaml").write_text("account: arts\nrules:\n  train: {account: physics}\n")
    results = {result.name: result for result in scheduler.check_scheduler(read(site))}
    assert results["account is valid"].state == state
    assert message in results["account is valid"].value
    for name in ("scontrol", "sacctmgr"):
        assert len((site / f"{name}.calls").read_text().splitlines()) == 1


def test_no_scheduler_for_local_processes() -> None:
    assert scheduler.check_scheduler(Profile(None)) == []
    other = Profile(None, {"executor": "kubernetes"})
    assert [result.state for result in scheduler.check_scheduler(other)] == ["warning"]
