"""Checks of `tokamake doctor`, passed and failed; the programs of a cluster are fakes."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_pbs import request as pbs_request
from snakemake_executor_plugin_sbatch import request as sbatch_request
from tests.support.pbs_servers import wait_for
from tests.support.runs import MPI
from tokamake.doctor import disk, environment, profile, programs, scheduler
from tokamake.doctor.doctor import doctor
from tokamake.doctor.launcher import Launcher
from tokamake.doctor.profile import Profile, Request
from tokamake.doctor.result import Result, ok, report, warning, wrong
from tokamake.doctor.scheduler import Queue
from tokamake.errors import UserError

FACTS = {
    "torch": "2.10.0+cpu", "device": "cpu", "devices": 0, "name": "", "backends": ["gloo"],
    "bf16": True, "seen": "",
}  # fmt: skip
CUDA = {
    **FACTS, "device": "cuda", "devices": 4, "name": "A100", "backends": ["gloo", "nccl"],
}  # fmt: skip
QSTAT = {
    "timestamp": 1795255324,
    "Queue": {
        "debug": {
            "queue_type": "Execution", "enabled": "True", "started": "True",
            "resources_max": {"nodect": 2, "walltime": "01:00:00"},
        },
        "prod": {
            "queue_type": "Route", "enabled": "True", "started": "True",
            "route_destinations": "small,large",
        },
        "small": {"resources_min": {"nodect": 10}, "resources_max": {"walltime": "06:00:00"}},
        "large": {"resources_min": {"nodect": 100}, "resources_max": {"walltime": "24:00:00"}},
        "closed": {"enabled": "False", "started": "True"},
        "stopped": {"enabled": "True", "started": "False"},
    },
}  # fmt: skip
PARTITIONS = """\
PartitionName=short AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES MaxNodes=UNLIMITED \
MaxTime=01:00:00 MinNodes=0 State=UP TotalCPUs=4
PartitionName=long AllowGroups=ALL AllowAccounts=physics,biology Default=NO MaxNodes=4 \
MaxTime=2-00:00:00 MinNodes=1 State=DRAIN
"""
SITE = """\
executor: pbs
pbs-user-file: {mine}
pbs-required: account queue
jobs: 10
default-resources: {{launch: "'site/launch.sh'", runtime: 60}}
set-resources:
  train: {{nodes: 2, tasks: 8, runtime: 60}}
"""


def states(results: list[Result]) -> dict[str, str]:
    return {result.name: result.state for result in results}


def program(folder: Path, name: str, text: str) -> None:
    """Write a fake program that logs its calls."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/{name}.calls\n{text}\n')
    path.chmod(0o755)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster with PBS, a profile and a user's file."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    folder = tmp_path / "site"
    folder.mkdir()
    (tmp_path / "mine.yaml").write_text("account: proj\nqueue: debug\n")
    (folder / "profile.yaml").write_text(SITE.format(mine=tmp_path / "mine.yaml"))
    (folder / "environment.sh").write_text(f"export MPI4PY_LIBMPI={MPI}\n")
    modules = '. "$(dirname "$0")/environment.sh"'
    text = f"#!/bin/sh\n{modules}\n# no srun here\nexec mpiexec -n $2\n"
    (folder / "launch.sh").write_text(text)
    (folder / "launch.sh").chmod(0o755)
    for name in ("qsub", "qselect", "qdel"):
        program(tmp_path, name, "")
    program(tmp_path, "qstat", f"cat <<'END'\n{json.dumps(QSTAT)}\nEND")
    return tmp_path


def read(site: Path) -> Profile:
    return profile.read_profile(site / "site", site)


def test_results_as_lines_and_as_json() -> None:
    assert ok("a", "1").line == "ok       a: 1"
    assert wrong("a", "1", "fix it").line == "wrong    a: 1 (fix it)"
    assert report([])["state"] == "ok"
    assert report([ok("a", "1"), warning("b", "2", "c")])["state"] == "warning"
    found = report([wrong("a", "1", "c"), warning("b", "2", "c")])
    assert found["state"] == "wrong"
    assert found["checks"][0] == {"name": "a", "state": "wrong", "value": "1", "remedy": "c"}


def late(monkeypatch: pytest.MonkeyPatch, begun: Path) -> None:
    """Make all programs time out as soon as one has written to that file."""

    def communicate(process: subprocess.Popen[str], *, timeout: float) -> None:
        wait_for(lambda: begun.exists() and begun.read_text().endswith("\n"), "it to begin")
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)


def test_programs_answer_fail_hang_or_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert programs.ask(["echo", "yes"], seconds=60).output == "yes\n"
    failed = programs.ask(["sh", "-c", "echo no such server >&2; exit 3"], seconds=60)
    assert failed.fault == "no such server (exit status 3)"
    assert programs.ask(["sleep", "600"], seconds=0.1).fault == "no answer within 0.1 s"
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    with monkeypatch.context() as patch:
        late(patch, tmp_path / "pid")
        hanging = programs.ask(["sh", "-c", script], seconds=2)
    assert hanging.fault == "no answer within 2 s"
    state = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    wait_for(lambda: not state.exists() or " Z " in state.read_text(), "what it started to end")
    assert "No such file" in programs.ask(["no-such-program"], seconds=60).fault


def test_an_old_python_and_the_environment_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = environment.check_python()
    assert found.state == "ok"
    assert sys.executable in found.value
    monkeypatch.setattr(environment.os, "getuid", lambda: 12345)
    monkeypatch.setattr(environment, "_owner", lambda _: "alice")
    os.chown(tmp_path, 4321, -1) if os.geteuid() == 0 else pytest.skip("needs root")
    (found,) = environment.check_python(tmp_path)
    assert found.state == "warning"
    assert "an environment of alice" in found.value
    assert "An environment of your own" in found.remedy
    monkeypatch.setattr(environment.platform, "python_version", lambda: "3.9.1")
    assert environment.check_python()[0].state == "wrong"


def test_torch_device_and_communication_back_end() -> None:
    found = environment.judge_torch(FACTS, {})
    assert set(states(found).values()) == {"ok"}
    found = environment.judge_torch(CUDA, {})
    assert "ok       device: cuda, 4 × A100" in [one.line for one in found]
    assert "ok       communication back end: nccl (also available: gloo)" in [o.line for o in found]
    old = environment.judge_torch({**FACTS, "torch": "2.3.1"}, {})
    assert states(old)["torch"] == "warning"
    deaf = environment.judge_torch({**CUDA, "backends": ["gloo"]}, {})
    assert states(deaf)["communication back end"] == "wrong"
    assert states(environment.judge_torch({**CUDA, "bf16": False}, {}))["bf16"] == "warning"
    blind = {**FACTS, "seen": "an NVIDIA GPU"}
    assert states(environment.judge_torch(blind, {}))["device"] == "warning"
    hidden = environment.judge_torch(blind, {"CUDA_VISIBLE_DEVICES": ""})
    assert states(hidden)["device"] == "ok"


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_TORCH", "import torch_of_the_site")
    (found,) = environment.check_torch()
    assert found.state == "wrong"
    assert "No module named 'torch_of_the_site'" in found.value


def test_deepspeed() -> None:
    assert environment.judge_deepspeed("0.19.2", "").state == "ok"
    for version, fault in (("0.12.0", ""), ("", "ImportError: no libaio")):
        found = environment.judge_deepspeed(version, fault)
        assert found.state == "warning"
        assert "pip install 'deepspeed" in found.remedy


def test_the_environment_of_these_tests_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", MPI)
    found = [*environment.check_torch(), *environment.check_mpi(Launcher("mpiexec"))]
    assert {"torch", "bf16", "DeepSpeed", "MPI"} <= set(states(found))
    assert set(states(found).values()) == {"ok"}


def test_only_mpiexec_needs_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_MPI", "raise ImportError('libmpi.so.12: not found')")
    assert environment.check_mpi(Launcher("srun")) == []
    (found,) = environment.check_mpi(Launcher("mpiexec"))
    assert found.state == "wrong"
    assert "libmpi.so.12" in found.value


def test_mpi_is_from_the_modules_that_the_launch_script_loads(site: Path) -> None:
    for library, state in ((site / "none.so", "wrong"), (MPI, "ok")):
        text = f"echo loading\nexport MPI4PY_LIBMPI={library}\nmpiexec=\n"
        (site / "site/environment.sh").write_text(text)
        (found,) = environment.check_mpi(read(site).launcher)
        assert found.state == state
    assert found.value.startswith("mpi4py 4")
    assert "MPICH" in found.value


def test_compiler_and_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(environment.check_compiler())["extension"] == "ok"
    monkeypatch.setenv("PATH", "/nowhere")
    assert states(environment.check_compiler())["compiler"] == "warning"
    monkeypatch.setitem(sys.modules, "tokamake._csrc", None)
    assert states(environment.check_compiler())["extension"] == "wrong"


def test_snakemake_and_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(environment.check_snakemake("local")) == {"snakemake": "ok"}
    assert states(environment.check_snakemake("pbs"))["executor"] == "ok"
    missing = environment.check_snakemake("no-such")
    assert missing[-1].remedy == "pip install snakemake-executor-plugin-no-such"
    monkeypatch.setattr(environment.metadata, "version", lambda _: "7.32.4")
    assert states(environment.check_snakemake("local")) == {"snakemake": "wrong"}


def test_limits_of_the_system() -> None:
    endless, name = resource.RLIM_INFINITY, "locked memory"

    def judge(*limit: int) -> Result:
        return environment.judge_limit(name, limit, 2**26, command="ulimit -l", unit=1024)

    assert judge(endless, endless).line == "ok       locked memory: unlimited"
    assert judge(2**30, 2**30).state == "ok"
    assert "`ulimit -l unlimited`" in judge(65536, endless).remedy
    assert "`ulimit -l 1048576`" in judge(65536, 2**30).remedy
    assert "only your site" in judge(65536, 65536).remedy
    assert len(environment.check_limits(cluster=True)) == 2
    assert len(environment.check_limits(cluster=False)) == 1


def test_a_valid_profile(site: Path) -> None:
    found = read(site)
    assert found.launcher.name == "mpiexec"
    assert set(states(profile.check_profile(found)).values()) == {"ok"}
    assert [one.line for one in profile.check_personal(found)] == [
        "ok       account: proj",
        "ok       queue: debug",
    ]
    assert found.requests == [Request("train", 2, 60, "debug"), Request("", 1, 60, "debug")]


def test_values_for_a_rule_override_values_for_all_rules(site: Path) -> None:
    (site / "mine.yaml").write_text("account: a\nqueue: q\nrules: {train: {queue: prod}}\n")
    assert [request.queue for request in read(site).requests] == ["prod", "q"]


def test_a_profile_is_read_as_the_executors_read_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert profile.PERSONAL == {"pbs": pbs_request.PERSONAL, "sbatch": sbatch_request.PERSONAL}
    monkeypatch.setenv("MINE", str(site))
    path = site / "site/profile.yaml"
    text = path.read_text().replace(f"pbs-user-file: {site}", "pbs-user-file: $MINE")
    path.write_text(text.replace("account queue", "account,queue"))
    assert [one.line for one in profile.check_personal(read(site))] == [
        "ok       account: proj",
        "ok       queue: debug",
    ]


def test_a_group_requests_the_sum_of_the_times(site: Path) -> None:
    path = site / "site/profile.yaml"
    text = path.read_text().replace("set-resources:", "set-resources:\n  weigh: {runtime: 10}")
    path.write_text(text + "groups: {describe: prepare, weigh: prepare}\n")
    (site / "mine.yaml").write_text("account: a\nqueue: q\nrules: {prepare: {queue: prod}}\n")
    assert read(site).requests[1:] == [Request("", 1, 60, "q"), Request("prepare", 1, 70, "prod")]


def test_mistakes_in_a_profile(site: Path) -> None:
    path, script = site / "site/profile.yaml", site / "site/launch.sh"
    path.write_text(path.read_text() + "latency-wiat: 5\n")
    found = profile.judge_keys(read(site), {"executor", "jobs", "latency-wait"})
    assert found.state == "wrong"
    known = set(read(site).values) - {"latency-wiat"} | {"latency-wait"}
    found = profile.judge_keys(read(site), known)
    assert found.line == (
        "wrong    keys of the profile: latency-wiat: unknown to Snakemake "
        "(did you mean latency-wait?)"
    )
    script.chmod(0o644)
    assert f"{script}: not executable (chmod +x" in profile.judge_launch(read(site)).line
    script.unlink()
    assert "no such file" in profile.judge_launch(read(site)).value
    path.write_text("executor: pbs\n")
    assert profile.judge_launch(read(site)).value == "none"
    path.write_text("- executor\n")
    with pytest.raises(UserError, match="not a mapping of keys"):
        read(site)
    with pytest.raises(UserError, match=r"no profile\.yaml in it"):
        profile.read_profile(site / "none", site)


def test_values_that_the_doctor_cannot_read_are_not_known(site: Path) -> None:
    (site / "mine.yaml").write_text("rules: [train]\nqueue: debug\n")
    path = site / "site/profile.yaml"
    path.write_text(path.read_text().replace("runtime: 60}", "runtime: 2h}"))
    assert read(site).requests[0] == Request("train", 2, None, "debug")
    found = scheduler.judge_request(read(site).requests[0], QUEUES)
    assert found.value.startswith("2 nodes, time not known in debug; ")


def test_personal_values_that_are_missing(site: Path) -> None:
    (site / "mine.yaml").write_text("acount: proj\nqueue: debug\n")
    found = profile.check_personal(read(site))
    assert states(found) == {"your file": "wrong", "account": "wrong", "queue": "ok"}
    assert f"add `account: ...` to {site}/mine.yaml" in found[1].remedy


def test_pbs_is_queried_once(site: Path) -> None:
    found = scheduler.check_scheduler(read(site))
    assert [result.line for result in found] == [
        "ok       scheduler: qstat answers, 6 queues",
        "ok       account is valid: not known: the scheduler checks it only at submission",
        "ok       limits for train: 2 nodes, 60 min in debug; at most 2 nodes, at most 60 min",
        "ok       limits for other rules: 1 node, 60 min in debug; at most 2 nodes, at most 60 min",
    ]
    assert (site / "qstat.calls").read_text() == "-Q -f -F json\n"
    assert not (site / "qsub.calls").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo cannot connect >&2; exit 111", "qstat: cannot connect (exit status 111)"),
        ("sleep 600", "qstat: no answer within 240 s"),
        ("echo '{\"Queue\":'", "qstat: the answer contains no queue"),
    ],
)
def test_a_scheduler_that_does_not_answer(
    site: Path, text: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(site, "qstat", text)
    if "sleep" in text:
        late(monkeypatch, site / "qstat.calls")
    (found,) = scheduler.check_scheduler(read(site), seconds=240)
    assert (found.state, found.value) == ("wrong", told)
    assert len((site / "qstat.calls").read_text().splitlines()) == 1


def test_a_machine_without_the_schedulers_commands(site: Path) -> None:
    (site / "bin/qdel").unlink()
    (found,) = scheduler.check_scheduler(read(site))
    assert (found.state, found.value) == ("wrong", "no qdel found")


QUEUES = scheduler.pbs_queues(json.dumps(QSTAT))


@pytest.mark.parametrize(
    ("queue", "nodes", "minutes", "state", "told"),
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
def test_limits_of_queues(queue: str, nodes: int, minutes: int, state: str, told: str) -> None:
    found = scheduler.judge_request(Request("train", nodes, minutes, queue), QUEUES)
    assert found.state == state, found.line
    assert told in found.line


def test_partitions_of_slurm() -> None:
    found = scheduler.slurm_partitions(PARTITIONS)
    assert found == {
        "short": Queue(
            "short", default=True, max_nodes=float("inf"), min_nodes=0, max_minutes=60
        ),
        "long": Queue(
            "long", open=False, runs=False, max_nodes=4, min_nodes=1, max_minutes=2880,
            allowed=("physics", "biology"),
        ),
    }  # fmt: skip
    here = scheduler.judge_request(Request("train", 9, 30, ""), found)
    assert here.value == "9 nodes, 30 min in short; any number of nodes, at most 60 min"
    assert scheduler.judge_partition_account("physics", "long", found) is None
    assert scheduler.judge_partition_account("Physics", "long", found) is None
    refused = scheduler.judge_partition_account("arts", "long", found)
    assert refused is not None
    assert refused.remedy == "it accepts physics, biology"


@pytest.mark.parametrize(
    ("answer", "state", "told"),
    [
        ("echo physics; echo biology", "ok", "physics"),
        ("echo arts", "wrong", "physics: not your account"),
        ("echo no slurmdbd >&2; exit 1", "ok", "not known: sacctmgr: no slurmdbd"),
    ],
)
def test_accounts_of_slurm(site: Path, answer: str, state: str, told: str) -> None:
    for name in ("sbatch", "squeue", "scancel", "srun"):
        program(site, name, "")
    program(site, "scontrol", f"cat <<'END'\n{PARTITIONS}END")
    program(site, "sacctmgr", answer)
    (site / "site/profile.yaml").write_text(
        f"executor: sbatch\nsbatch-user-file: {site}/mine.yaml\nsbatch-defaults: partition=short\n"
        "default-resources:\n  launch: \"'site/launch.sh'\"\n"
    )
    (site / "mine.yaml").write_text("account: arts\nrules:\n  train: {account: physics}\n")
    found = {one.name: one for one in scheduler.check_scheduler(read(site))}
    assert found["account is valid"].state == state
    assert told in found["account is valid"].value
    for name in ("scontrol", "sacctmgr"):
        assert len((site / f"{name}.calls").read_text().splitlines()) == 1


def test_personal_values_on_slurm(site: Path) -> None:
    start = f"executor: sbatch\nsbatch-user-file: {site}/mine.yaml\nsbatch-required: account qos\n"
    (site / "site/profile.yaml").write_text(start)
    (site / "mine.yaml").write_text("qos: debug\nqueue: short\n")
    told = {one.name: one.line for one in profile.check_personal(read(site))}
    assert told["your file"].startswith(f"wrong    your file: {site}/mine.yaml: queue: unknown")
    assert f"add `account: ...` to {site}/mine.yaml" in told["account"]
    assert told["qos"] == "ok       qos: debug"
    assert told["partition"] == "ok       partition: none, so Slurm uses your default"
    (site / "site/profile.yaml").write_text(
        f"{start}set-resources:\n  train: {{slurm_account: arts}}\n"
    )
    assert {one.name: one.line for one in profile.check_personal(read(site))}["account"] == (
        "ok       account: arts"
    )


def test_no_scheduler_for_local_processes() -> None:
    assert scheduler.check_scheduler(Profile(None)) == []
    other = Profile(None, {"executor": "kubernetes"})
    assert [one.state for one in scheduler.check_scheduler(other)] == ["warning"]


@pytest.mark.parametrize(
    ("free", "files", "all_files", "state"),
    [
        (1e12, 10**7, 10**8, "ok"),
        (1e12, 0, 0, "ok"),  # file systems that report no limit
        (5e9, 10**7, 10**8, "warning"),
        (1e12, 5_000, 10**8, "warning"),
        (5e8, 10**7, 10**8, "wrong"),
        (1e12, 10, 10**8, "wrong"),
    ],
)
def test_space_on_a_disk(free: float, files: int, all_files: int, state: str) -> None:
    assert disk.judge_free("disk", int(free), files, all_files).state == state


def test_measuring_a_disk_leaves_no_files(tmp_path: Path) -> None:
    found = disk.check_disks(tmp_path / "new", [tmp_path], cluster=False)
    assert len(found) == 3  # results and data are on the same disk
    assert states(found)[f"disk of {tmp_path}/new/results, flock"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_slow_disks_and_disks_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, slow = disk.Speed(1e8, 1e9, ""), disk.Speed(1e6, 1e9, "")
    assert [one.state for one in disk.judge_speed("disk", good)] == ["ok", "ok"]
    assert [one.state for one in disk.judge_speed("disk", slow)] == ["warning", "ok"]

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    found = disk.check_disk("disk", tmp_path, writes=True)[-1]
    assert found.state == "warning"
    assert "mount option flock" in found.remedy
    monkeypatch.setattr(disk.os, "fsync", refuse)
    assert disk.check_disk("disk", tmp_path, writes=True)[-1].state == "wrong"
    assert list(tmp_path.iterdir()) == []


def test_data_may_be_read_only_and_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    missing = disk.check_disks(tmp_path, [tmp_path / "none"], cluster=False)
    assert missing[-1].line.startswith(f"wrong    disk of {tmp_path}/none: no such folder")
    monkeypatch.setattr(disk.tempfile, "NamedTemporaryFile", refuse)
    assert disk.check_disk("disk", tmp_path, writes=False)[-1].state == "ok"
    assert disk.check_disk("disk", tmp_path, writes=True)[-1].state == "wrong"


def test_a_folder_without_permission_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def refuse(path: object, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{tmp_path}/theirs/"):
            raise PermissionError(13, "Permission denied")
        return real(path, **options)  # type: ignore[arg-type]

    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(os, "stat", refuse)
    found = disk.check_disks(tmp_path, [tmp_path / "theirs/raw"], cluster=False)
    assert "theirs/raw: no such folder, or no permission" in found[-1].line


def test_results_in_a_home_get_a_warning_on_clusters(tmp_path: Path) -> None:
    home, project = tmp_path / "home/me", tmp_path / "project"
    (home / "work").mkdir(parents=True)
    project.mkdir()
    (project / "link").symlink_to(home)
    (tmp_path / "homes").symlink_to(tmp_path / "home")

    def judge(directory: Path, own: Path = home) -> Result | None:
        found = disk.check_disks(directory, [], cluster=True, home=own)[-1]
        return found if found.name == "place" else None

    for inside in (home, home / "work", home / "new/folder", project / "link/work"):
        assert (found := judge(inside)) is not None
        assert (found.state, found.value) == ("warning", f"{inside.resolve()} is in your home")
    assert judge(home / "work", tmp_path / "homes/me")
    # All of these lie on one file system, as on a machine with one disk.
    for elsewhere in (project, home.parent, tmp_path / "home/me2"):
        assert judge(elsewhere) is None
    assert judge(project, tmp_path / "no-home") is None
    assert "place" not in states(disk.check_disks(home, [], cluster=False, home=home))


def test_the_command_reports_faults_and_exits_with_1(site: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tokamake", "doctor", "--profile", "site"]
        return subprocess.run(
            [*command, "--output", "report.json"], cwd=site, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\nok       limits for train: " in result.stdout
    assert json.loads((site / "report.json").read_text())["state"] != "wrong"
    (site / "mine.yaml").write_text("account: proj\nqueue: large\n")
    result = run()
    assert result.returncode == 1
    assert (
        "wrong    limits for train: 2 nodes, 60 min in large, which requires at least 100 nodes"
        in (result.stdout)
    )
    assert result.stderr == ""
    assert json.loads((site / "report.json").read_text())["state"] == "wrong"


def test_a_missing_profile_is_one_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        doctor(profile=tmp_path / "none", directory=tmp_path)
    assert caught.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("wrong")] == [
        f"wrong    profile: {tmp_path}/none: no profile.yaml in it; give the folder of a profile "
        "(fix it)"
    ]
