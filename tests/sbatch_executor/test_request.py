"""Options of sbatch, and the status of jobs from squeue; test_slurm.py has a real Slurm."""

import os
from pathlib import Path

import pytest
from snakemake.iocontainers import ResourceList

from snakemake_executor_plugin_pbs.base.commands import (
    CommandResult,
    Later,
    Refused,
    Unreachable,
    Unsure,
)
from snakemake_executor_plugin_pbs.base.errors import UserError
from snakemake_executor_plugin_pbs.base.script import script
from snakemake_executor_plugin_pbs.base.states import JobState
from snakemake_executor_plugin_pbs.base.user_file import UserFile, read_user_file
from snakemake_executor_plugin_sbatch.commands import SLURM, SlurmCommands, parse
from snakemake_executor_plugin_sbatch.request import PERSONAL, build_request, read_defaults
from snakemake_executor_plugin_sbatch.states import read

NO_VALUES = UserFile(Path("me.yaml"), {}, {})
DEFAULT = "--nodes=1 --ntasks=1 --cpus-per-task=4"


def options(resources: dict, user: UserFile = NO_VALUES) -> str:
    """Options of a job, whose resources are Snakemake's own list with names."""
    of_job = ResourceList(fromdict=resources)
    return " ".join(build_request("train", 4, of_job, user).arguments)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, ""),  # no ranks
        ({"tasks": 8}, " --gpus-per-node=4"),
        ({"tasks": 8, "gpus_per_node": 8}, " --gpus-per-node=8"),
        ({"tasks": 8, "gres": "gpu:a100:2"}, " --gres=gpu:a100:2"),
        ({"tasks": 8, "gpu": 2}, " --gpus=2"),
    ],
)
def test_one_value_of_the_user_requests_gpus_for_all_ranks(resources: dict, expected: str) -> None:
    user = UserFile(Path("me.yaml"), {"gpus_per_node": "4"}, {})
    tasks = resources.get("tasks", 1)
    assert options(resources, user) == f"--nodes=1 --ntasks={tasks} --cpus-per-task=4{expected}"


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, DEFAULT),
        ({"mem_mb": 0}, DEFAULT),
        ({"mem_mb": 8000, "runtime": 90}, f"{DEFAULT} --mem=8000 --time=90"),
        (
            {"nodes": 2, "tasks": 8, "cpus_per_task": 32, "gpus_per_node": 4, "signal": "TERM@60"},
            "--nodes=2 --ntasks=8 --cpus-per-task=32 --signal=TERM@60 --gpus-per-node=4",
        ),
        (
            {"slurm_account": "P", "slurm_partition": "gpu", "qos": "debug", "constraint": "a|b"},
            f"{DEFAULT} --account=P --partition=gpu --qos=debug --constraint=a|b",
        ),
        ({"gres": "gpu:2", "slurm_extra": "-x n1"}, f"{DEFAULT} --gres=gpu:2 -x n1"),
        ({"gpu": 3}, f"{DEFAULT} --gpus=3"),
        ({"gpu": 3, "gpu_model": "h100", "runtime": 9}, f"{DEFAULT} --gpus=h100:3 --time=9"),
        ({"mem_mb_per_cpu": 900}, f"{DEFAULT} --mem-per-cpu=900"),
        (
            {"nodes": 2, "tasks_per_node": 3},
            "--nodes=2 --ntasks=6 --cpus-per-task=4 --ntasks-per-node=3",
        ),
        (
            {"nodes": 2, "tasks": 5, "tasks_per_node": 3},
            "--nodes=2 --ntasks=5 --cpus-per-task=4 --ntasks-per-node=3",
        ),
        ({"spare_nodes": 0}, DEFAULT),
        (
            {"nodes": 2, "tasks": 8, "spare_nodes": 1},
            "--nodes=3 --ntasks=12 --ntasks-per-node=4 --no-kill --cpus-per-task=4",
        ),
        (
            {"nodes": 2, "tasks": 3, "spare_nodes": 2},
            "--nodes=4 --ntasks=8 --ntasks-per-node=2 --no-kill --cpus-per-task=4",
        ),
    ],
)  # fmt: skip
def test_resources_become_options_of_sbatch(resources: dict, expected: str) -> None:
    assert options(resources) == expected


def test_values_of_job_rule_user_and_site_replace_each_other_in_this_order(
    tmp_path: Path,
) -> None:
    path = tmp_path / "me.yaml"
    path.write_text("account: A\nqos: all\nrules:\n  train:\n    qos: mine\n")
    user = read_user_file(path, PERSONAL)
    assert options({}, user) == f"{DEFAULT} --account=A --qos=mine"
    assert options({"qos": "job"}, user) == f"{DEFAULT} --account=A --qos=job"
    site = {**read_defaults("constraint=gpu account=S"), **user.common}
    assert (
        options({}, UserFile(path, site, {})) == f"{DEFAULT} --account=A --qos=all --constraint=gpu"
    )
    assert build_request("train", 1, {"slurm_partition": "p"}, user).queue == "p"


@pytest.mark.parametrize(
    ("resources", "match"),
    [
        ({"nodes": 0}, "nodes: 0"),
        ({"tasks": "many"}, "tasks: 'many'"),
        ({"spare_nodes": -1}, "spare_nodes: -1"),
        ({"runtime": 1.5}, "runtime: 1.5"),
        ({"gpu": "two"}, "gpu: 'two': must be a whole number"),
        ({"gpu_model": "h100"}, "gpu_model: 'h100': without gpu; set gpu to the number"),
        ({"tasks": 5, "tasks_per_node": 3}, "tasks: 5: more than 1 nodes with tasks_per_node 3"),
        ({"clusters": "big"}, "clusters: 'big': jobs on other clusters are not followed; start"),
        ({"mem_mb": 1, "mem_mb_per_cpu": 1}, "mem_mb: 1: with mem_mb_per_cpu 1; remove one"),
        ({"gpu": 1, "gres": "gpu:1"}, "gpu: 1: with gres 'gpu:1'; remove one of them"),
        ({"spare_nodes": 1, "tasks_per_node": 2}, "spare_nodes: 1: with tasks_per_node 2"),
        ({"slurm_extra": "--output=x"}, "--output=x: the executor sets this itself"),
        ({"slurm_extra": "-Jname"}, "-Jname: the executor sets this itself"),
        ({"slurm_extra": "'open"}, "No closing quotation"),
    ],
)
def test_errors_in_resources(resources: dict, match: str) -> None:
    with pytest.raises(UserError, match=match):
        options(resources)


@pytest.mark.parametrize("text", ["queue=debug", "qos", "qos="])
def test_errors_in_the_defaults_of_the_site(text: str) -> None:
    with pytest.raises(UserError, match=r"--sbatch-defaults: .*names are account"):
        read_defaults(text)


@pytest.mark.parametrize(
    ("name", "reason", "code", "state", "message"),
    [
        ("PENDING", "Priority", "0", JobState.WAITING, "queued"),
        ("PENDING", "JobHeldUser", "0", JobState.HELD, "held by a user"),
        ("PENDING", "launch failed requeued held", "0", JobState.HELD, "held (launch failed"),
        ("PENDING", "PartitionTimeLimit", "0", JobState.NEVER, "can never run: the time limit"),
        (
            "PENDING",
            "PartitionNodeLimit",
            "0",
            JobState.HELD,
            "waiting: the partition does not have",
        ),
        ("PENDING", "InvalidAccount", "0", JobState.HELD, "waiting: the account is invalid"),
        ("COMPLETING", "None", "0", JobState.RUNNING, "ending"),
        ("COMPLETED", "None", "0", JobState.SUCCEEDED, "finished"),
        ("FAILED", "NonZeroExitCode", "768", JobState.FAILED, "failed with exit status 3"),
        ("FAILED", "RaisedSignal:9", "9", JobState.FAILED, "was killed by signal 9"),
        ("TIMEOUT", "TimeLimit", "0", JobState.FAILED, "killed by Slurm: time; raise runtime"),
        ("OUT_OF_MEMORY", "OutOfMemory", "0", JobState.FAILED, "memory; raise mem_mb"),
        ("NODE_FAIL", "NodeDown", "1", JobState.FAILED, "was lost with its node"),
        ("CANCELLED", "None", "0", JobState.DELETED, "was cancelled"),
    ],
)
def test_each_state_of_slurm_has_its_status(
    name: str, reason: str, code: str, state: JobState, message: str
) -> None:
    status = read({"state": name, "reason": reason, "exit_code": code})
    assert status is not None
    assert status.state is state
    assert message in status.message


@pytest.mark.parametrize(
    ("host", "nodes", "state"),
    [
        ("n1", "n[1-3]", JobState.RUNNING),
        ("n1", "n[2-3]", JobState.NEVER),
        ("n1", "n[10-12],m1", JobState.NEVER),
        ("n1", "m7,n1", JobState.RUNNING),
        ("n11", "n[9-12]", JobState.RUNNING),
        ("r2c0s07b0", "r[1-2]c0s[05,07-08]b0", JobState.RUNNING),
        ("r2c0s06b0", "r[1-2]c0s[05,07-08]b0", JobState.NEVER),
        ("n7", "n[06-08]", JobState.NEVER),
        ("n1", "", JobState.RUNNING),
        ("", "n[2-3]", JobState.RUNNING),
    ],
)
def test_a_job_that_goes_on_without_the_node_of_its_script_has_failed(
    host: str, nodes: str, state: JobState
) -> None:
    line = f"11|RUNNING|None|0|train.f00|{host}|{nodes}|\n"
    status = read(parse(CommandResult(0, line, ""), ["11"]).jobs["11"])
    assert status is not None
    assert status.state is state


def test_an_unknown_state_has_no_status() -> None:
    assert read({"state": "NEW_ONE", "reason": "", "exit_code": "0"}) is None


def test_only_a_complete_answer_denies_a_job() -> None:
    answer = parse(
        CommandResult(0, "11|RUNNING|None|0|\n12|FAILED|NonZeroExitCode|256|\n", ""), ["11", "13"]
    )
    assert answer.jobs["11"]["state"] == "RUNNING"
    named = parse(CommandResult(0, "11|RUNNING|None|0|train.f00|\n", ""), ["11"])
    assert named.jobs["11"]["Job_Name"] == "train.f00"
    assert answer.unknown == {"13"}
    failed = CommandResult(1, "11|RUNNING|None|0|\n", "slurm_load_jobs error: timed out")
    answer = parse(failed, ["11", "13"])
    assert (answer.jobs, answer.unknown) == ({}, set())
    assert "timed out" in answer.fault
    unknown = CommandResult(1, "", "slurm_load_jobs error: Invalid job id specified")
    assert parse(unknown, ["13"]).unknown == {"13"}
    assert parse(unknown, ["13", "14"]).unknown == set()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replace a command of Slurm: it prints a text and ends with an exit status."""

    def make(name: str, code: int, *, output: str = "", errors: str = "") -> SlurmCommands:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\nprintf '{output}'; printf '{errors}' >&2; exit {code}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return SlurmCommands(timeout=300)

    return make


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account", Refused),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", Later),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", Later),
        ("sbatch: error: Socket timed out on send/recv operation", Unsure),
    ],
)
def test_errors_of_sbatch_have_types(command, errors: str, expected: type[Exception]) -> None:
    with pytest.raises(expected):
        command("sbatch", 1, errors=errors).submit([], Path("job.sh"))


def test_the_job_id_of_sbatch_has_no_cluster_name(command) -> None:
    assert command("sbatch", 0, output="41;other\\n").submit([], Path("job.sh")) == "41"


def test_a_failed_squeue_is_no_answer(command) -> None:
    assert command("squeue", 0, output="41\\n").find("name") == ["41"]
    with pytest.raises(Unreachable):
        command("squeue", 1, errors="slurm_load_jobs error").find("name")


def test_cancelling_an_ended_job_is_no_error(command) -> None:
    ended = "scancel: error: Kill job error on job id 41: Invalid job id specified"
    assert command("scancel", 1, errors=ended).delete(["41"]) == ""
    assert "denied" in command("scancel", 1, errors="Access denied").delete(["41"])


def test_slurm_has_its_own_options_and_id_variable() -> None:
    assert SLURM.options("name", Path("/a/50%/b"))[-1] == "/a/50%%/b"
    assert "id=$SLURM_JOB_ID\n" in script([(Path("/a"), "token")], SLURM.id_variable)


def test_jobs_do_not_inherit_variables_of_the_job_of_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "sbatch"
    fake.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\necho 17\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job_variables = (
        "MASTER_ADDR",
        "SLURM_NTASKS",
        "SLURMD_NODENAME",
        "RANK",
        "LOCAL_RANK",
        "PMI_RANK",
    )
    for name in (*job_variables, "SLURM_CONF", "SBATCH_ACCOUNT", "HF_HOME"):
        monkeypatch.setenv(name, "here")
    assert SlurmCommands(300).submit((), tmp_path / "job.sh") == "17"
    inherited = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert not inherited & set(job_variables)
    assert {"SLURM_CONF", "SBATCH_ACCOUNT", "HF_HOME"} <= inherited


@pytest.mark.parametrize(
    "error",
    [
        "sbatch: error: AssocGrpSubmitJobsLimit",
        "sbatch: error: QOSMaxSubmitJobPerUserLimit",
        "sbatch: error: Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_limit_on_the_number_of_jobs_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    fake = tmp_path / "sbatch"
    fake.write_text(f"#!/bin/sh\necho '{error}' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Later):
        SlurmCommands(300).submit((), tmp_path / "job.sh")
