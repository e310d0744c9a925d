"""Commands that the launch scripts of the profiles start; stand-ins print their arguments."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.pbs_servers import Pbs, stand_in
from tests.support.snakemake_server import start
from tests.support.workflows import jobs, make_workspace

MPIEXEC = ["mpiexec", "--envall", "--line-buffer"]
SRUN = ["srun", "--nodes", "2", "--ntasks", "8", "--kill-on-bad-exit=1"]
ALLOCATED = {"PBS_NODEFILE": "hosts", "SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "6"}
EXPECTED = {
    "slurm": (2, 8, [*SRUN, "--cpus-per-task=6"]),
    "slurm-plugin": (2, 8, [*SRUN, "--cpus-per-task=6"]),
    "perlmutter": (2, 8, [*SRUN, "--cpus-per-task=6", "--gpu-bind=none", "--cpu-bind=cores"]),
    "aws-parallelcluster": (2, 8, [*SRUN, "--cpus-per-task=6"]),
    "aurora": (2, 24, [*MPIEXEC, "--np=24", "--ppn=12", "--hostfile=hosts"]),
    "sunspot": (2, 24, [*MPIEXEC, "--np=24", "--ppn=12", "--hostfile=hosts"]),
    "polaris": (4, 16, [*MPIEXEC, "--np=16", "--ppn=4", "--hostfile=hosts"]),
}  # fmt: skip


def launch(
    profile: str, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    for name in ("srun", "mpiexec"):
        stand_in = folder / name
        stand_in.write_text(f'#!/bin/sh\nenv > "{folder}/{name}.env"\nprintf "%s\\n" {name} "$@"\n')
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    shown = "JobId=1 NodeList=n[1-2] CPUs/Task=6 EndTime=2026-11-27T03:00:00 Dependency=(null)"
    (folder / "scontrol").write_text(f'#!/bin/sh\n[ "$2 $3" != "show job" ] || echo "{shown}"\n')
    (folder / "scontrol").chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [ROOT / f"profiles/{profile}/launch.sh", *arguments],
        env={"PATH": path, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("profile", EXPECTED)
def test_launch_scripts_start_the_command_with_their_options(tmp_path: Path, profile: str) -> None:
    nodes, tasks, expected = EXPECTED[profile]
    command = ["tokamake", "train", "--config", "a b.yaml"]
    result = launch(profile, tmp_path, str(nodes), str(tasks), *command, **ALLOCATED)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[: len(expected)] == expected
    assert lines[-len(command) :] == command


def test_the_launch_script_of_the_plug_in_restores_variables_of_slurm(tmp_path: Path) -> None:
    """The plug-in removes all of them but the id of the job."""
    result = launch("slurm-plugin", tmp_path, "2", "8", "true", SLURM_JOB_ID="1", TZ="UTC")
    assert result.returncode == 0, result.stderr
    variables = set((tmp_path / "srun.env").read_text().splitlines())
    assert variables >= {
        "SLURM_JOB_ID=1", "SLURM_JOB_NODELIST=n[1-2]", "SLURM_CPUS_PER_TASK=6",
        "SLURM_JOB_END_TIME=1795748400",
    }  # fmt: skip


@pytest.mark.parametrize("profile", EXPECTED)
def test_launch_scripts_start_ranks_on_the_chosen_hosts(tmp_path: Path, profile: str) -> None:
    nodes, tasks, _ = EXPECTED[profile]
    chosen = {**ALLOCATED, "TOKAMAKE_HOSTFILE": f"{tmp_path}/chosen hosts"}
    (tmp_path / "chosen hosts").write_text("n1\nn3\n")
    lines = launch(profile, tmp_path, str(nodes), str(tasks), "true", **chosen).stdout.splitlines()
    option = "--nodelist" if lines[0] == "srun" else "--hostfile"
    assert [line for line in lines if line.startswith(("--nodelist", "--hostfile"))] == [
        f"{option}={tmp_path}/chosen hosts"
    ]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("aurora", {"ZE_FLAT_DEVICE_HIERARCHY=FLAT", "CCL_PROCESS_LAUNCHER=pmix",
                    "CCL_ATL_TRANSPORT=mpi", "CCL_KVS_MODE=mpi", "OMP_NUM_THREADS=8",
                    "FI_MR_CACHE_MONITOR=userfaultfd"}),
        ("polaris", {"NCCL_NET_GDR_LEVEL=PHB", "NCCL_CROSS_NIC=1", "OMP_NUM_THREADS=8",
                     "FI_CXI_DISABLE_HOST_REGISTER=1", "FI_CXI_DEFAULT_CQ_SIZE=131072",
                     "FI_MR_CACHE_MONITOR=userfaultfd"}),
        ("perlmutter", {"NCCL_SOCKET_IFNAME=hsn", "NCCL_NET_GDR_LEVEL=PHB", "NCCL_CROSS_NIC=1",
                        "FI_CXI_DISABLE_HOST_REGISTER=1", "FI_CXI_DEFAULT_CQ_SIZE=131072",
                        "FI_MR_CACHE_MONITOR=userfaultfd", "OMP_NUM_THREADS=16"}),
        ("aws-parallelcluster", {"FI_EFA_FORK_SAFE=1", "FI_EFA_USE_HUGE_PAGE=0",
                                 "NCCL_SOCKET_IFNAME=^docker,lo", "OMP_NUM_THREADS=6"}),
    ],
)  # fmt: skip
def test_ranks_have_the_settings_of_their_network(
    tmp_path: Path, profile: str, expected: set[str]
) -> None:
    variables = tmp_path / "variables"
    for name in ("mpiexec", "srun"):
        (tmp_path / name).write_text(f"#!/bin/sh\nenv > {variables}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **ALLOCATED}
    script = ROOT / f"profiles/{profile}/launch.sh"
    subprocess.run([script, "1", "4", "true"], env=environment, check=True)
    assert expected <= set(variables.read_text().splitlines())
    # NCCL_NET is set only if the site has the plug-in: NCCL stops if it is missing.
    assert not any(line.startswith("NCCL_NET=") for line in variables.read_text().splitlines())


@pytest.mark.parametrize(
    ("first", "here", "chosen", "place"),
    [
        ("localhost", "localhost", "", "localhost"),
        ("no-such-host", "no-such-host", "", "10.0.0.7"),  # a name that only Slurm knows
        ("localhost", "login", "", ""),
        ("localhost", "localhost", "localhost\nn3\n", "localhost"),
        ("localhost", "localhost", "n2\nn3\n", ""),  # the node of the script is left out
    ],
)
@pytest.mark.parametrize("profile", ["slurm", "perlmutter", "aws-parallelcluster"])
def test_ranks_meet_at_a_free_port_of_the_first_node(
    tmp_path: Path, profile: str, first: str, here: str, chosen: str, place: str
) -> None:
    stand_in = tmp_path / "scontrol"
    stand_in.write_text(
        f"#!/bin/sh\n[ $2 = hostnames ] && printf '{first}\\nother\\n' ||"
        f" echo 'NodeName={first} NodeAddr=10.0.0.7 NodeHostName=x Port=1'\n"
    )
    stand_in.chmod(0o755)
    (tmp_path / "getent").write_text('#!/bin/sh\n[ "$2" = localhost ]\n')
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$MASTER_ADDR $MASTER_PORT"\n')
    (tmp_path / "python").write_text("#!/bin/sh\necho a module's python; exit 1\n")
    for name in ("getent", "srun", "python"):
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"SLURM_JOB_NODELIST": "a,b", "SLURMD_NODENAME": here, "PATH": path}
    if chosen:
        (tmp_path / "chosen").write_text(chosen)
        variables["TOKAMAKE_HOSTFILE"] = str(tmp_path / "chosen")
    script = ROOT / f"profiles/{profile}/launch.sh"
    process = subprocess.run(
        [script, "2", "8", "true"], env={**ALLOCATED, **variables}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    address, _, port = process.stdout.strip("\n").partition(" ")
    assert address == place
    assert bool(port) == bool(place)
    if port:
        with socket.socket() as listener:
            listener.bind(("", int(port)))


@pytest.mark.parametrize("profile", EXPECTED)
def test_clusters_choose_jobs_greedily(profile: str) -> None:
    values = yaml.safe_load((ROOT / f"profiles/{profile}/profile.yaml").read_text())
    assert values["scheduler"] == "greedy"


@pytest.mark.parametrize("profile", ["slurm", "slurm-plugin", "perlmutter", "aws-parallelcluster"])
def test_all_jobs_with_ranks_have_the_cores_of_training(profile: str) -> None:
    """On Slurm, they are those of a task; without the setting, a rule has two."""
    threads = yaml.safe_load((ROOT / f"profiles/{profile}/profile.yaml").read_text())["set-threads"]
    rules = {"evaluate", "evaluate_task", "evaluate_finetuned", "finetune"}
    rules |= {"generate", "generate_texts"}
    assert {threads[rule] for rule in rules} == {threads["train"]}


@pytest.mark.parametrize(
    "profile", ["slurm", "slurm-plugin", "perlmutter", "aws-parallelcluster", "polaris"]
)
def test_finetuning_has_the_ranks_and_devices_of_evaluation(profile: str) -> None:
    values = yaml.safe_load((ROOT / f"profiles/{profile}/profile.yaml").read_text())
    resources = values["set-resources"]
    for rule in ("finetune", "evaluate_finetuned"):
        assert resources[rule] == resources["evaluate"]


def test_environment_scripts_load_the_modules_of_the_site(tmp_path: Path) -> None:
    for profile, expected in (
        ("aurora", "load frameworks"), ("polaris", "load conda"), ("perlmutter", "load pytorch"),
    ):  # fmt: skip
        source = f". {ROOT}/profiles/{profile}/environment.sh"
        script = f'module() {{ echo "$@"; }}; conda() {{ :; }}; {source}'
        process = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        assert expected in process.stdout.splitlines()


@pytest.mark.parametrize("profile", ["local", *sorted(EXPECTED.keys() - {"slurm-plugin"})])
def test_every_profile_plans_the_shipped_config(tmp_path: Path, profile: str) -> None:
    """Also as a small try-out, with `train_steps` alone. Cluster profiles run the doctor, too."""
    users = tmp_path / ".config/tokamake"
    users.mkdir(parents=True)
    on_pbs = profile in ("aurora", "polaris", "sunspot")
    own = "queue: debug\nfilesystems: home\n" if on_pbs else "gpus_per_node: 4\n"
    (users / f"{profile}.yaml").write_text(f"account: mine\n{own}")
    for name in ("workflow", "profiles", "config"):
        (tmp_path / name).symlink_to(ROOT / name)
    for options in ((), ("--config", "train={train_steps: 12}")):
        arguments = ["--profile", f"profiles/{profile}", "-n", *options, "--", "train"]
        result = start(arguments, tmp_path, {**os.environ, "HOME": str(tmp_path)})
        planned = jobs(result)
        assert planned["train"] == 1
        assert planned.get("doctor", 0) == (profile != "local")


@pytest.fixture
def pbs(tmp_path: Path) -> Iterator[Pbs]:
    server = stand_in(tmp_path / "server")
    yield server
    server.stop()


@pytest.mark.parametrize(
    "profile",
    ["aurora", *(pytest.param(name, marks=pytest.mark.grid) for name in ("polaris", "sunspot"))],
)
def test_a_pbs_profile_runs_a_rule_of_the_workflow(tmp_path: Path, pbs: Pbs, profile: str) -> None:
    (tmp_path / "work").mkdir()
    folder = make_workspace(tmp_path / "work")

    def run() -> subprocess.CompletedProcess[str]:
        arguments = [
            "--profile", f"profiles/{profile}", "--configfile", "my.yaml",
            "--seconds-between-status-checks", "1", "--", "results/raw/code/code-00.jsonl",
        ]  # fmt: skip
        return start(arguments, folder, {**pbs.environment, "HOME": str(tmp_path)})

    result = run()
    assert result.returncode == 2
    user_file = tmp_path / f".config/tokamake/{profile}.yaml"
    words = (
        f"tokamake: {user_file}: no account, queue, filesystems, which this site requires; write"
    )
    assert words in result.stdout + result.stderr
    user_file.parent.mkdir(parents=True)
    user_file.write_text("account: proj\nqueue: debug\nfilesystems: home:flare\n")
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    [job] = pbs.jobs()
    assert (job["account"], job["queue"]) == ("proj", "debug")
    system = ":system=polaris" if profile == "polaris" else ""
    assert job["asked"] == {
        "select": f"1{system}", "place": "scatter", "walltime": "00:10:00",
        "filesystems": "home:flare",
    }  # fmt: skip


def test_aurora_binds_each_rank_to_its_own_cores(tmp_path: Path) -> None:
    result = launch("aurora", tmp_path, "1", "12", "true", PBS_NODEFILE="hosts")
    binding = next(line for line in result.stdout.splitlines() if line.startswith("--cpu-bind="))
    ranges = [range(int(a), int(b) + 1) for a, b in (r.split("-") for r in binding.split(":")[1:])]
    cores = [core for part in ranges for core in part]
    assert len(ranges) == 12
    assert len(cores) == len(set(cores)) == 96
    assert max(cores) < 104  # two sockets of 52 cores; the first core of each is for the system
    assert not {0, 52} & set(cores)


@pytest.mark.ranks
@pytest.mark.parametrize(("gpus", "seen"), [(1, "hidden"), (2, "seen")])
def test_local_ranks_share_no_gpu(tmp_path: Path, gpus: int, seen: str) -> None:
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\n" + "echo GPU 0: a\n" * gpus)
    stand_in.chmod(0o755)
    script = '[ -z "${CUDA_VISIBLE_DEVICES+set}" ] && echo seen || echo hidden'
    result = launch("local", tmp_path, "1", "2", "bash", "-c", script)
    assert result.stdout.splitlines() == [seen] * 2
    assert ("2 ranks, 1 GPU: on CPUs" in result.stderr) == (seen == "hidden")


@pytest.mark.ranks
def test_local_ranks_and_their_exit_status(tmp_path: Path) -> None:
    script = (
        f'echo "rank $RANK of $WORLD_SIZE"; cd {tmp_path}; touch ready.$RANK; '
        '[ "$RANK" = 0 ] || exit 0; until [ -e ready.1 ] && [ -e ready.2 ]; do sleep 0.02; done; '
        "echo mistake >&2; exit 75"
    )
    result = launch("local", tmp_path, "1", "3", "bash", "-c", script)
    assert result.returncode == 75
    assert result.stderr.splitlines() == ["mistake"]
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 3" for rank in range(3)]
    result = launch(
        "local", tmp_path, "1", "2", "bash", "-c", '[ "$RANK" = 1 ] || exit 0; kill -9 $BASHPID'
    )
    assert result.returncode == 128 + 9
    assert result.stderr.splitlines() == ["rank 1 was ended by signal 9"]


def test_launch_scripts_refuse_impossible_layouts(tmp_path: Path) -> None:
    result = launch("local", tmp_path, "2", "2", "true")
    assert (result.returncode, "one machine" in result.stderr) == (2, True)
    result = launch("polaris", tmp_path, "2", "5", "true", PBS_NODEFILE="hosts")
    assert (result.returncode, "5 tasks cannot be divided evenly" in result.stderr) == (2, True)
    result = launch("aurora", tmp_path, "1", "12", "true")
    assert result.returncode != 0
    assert "runs inside a PBS job" in result.stderr
    for profile in ("perlmutter", "aws-parallelcluster"):
        result = launch(profile, tmp_path, "1", "4", "true")
        assert result.returncode != 0
        assert "runs inside a Slurm job" in result.stderr


@pytest.mark.parametrize(("threads", "share"), [("7", 3), ("1", 1)])
def test_ranks_share_the_threads_of_their_job(threads: str, share: int) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        [ROOT / "profiles/local/launch.sh", "1", "2", "sh", "-c", "echo $OMP_NUM_THREADS"],
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": threads},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout == f"{share}\n" * 2
