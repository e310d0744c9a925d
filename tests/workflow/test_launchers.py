"""DeepSpeed's launcher, that of profiles/local, and which mpiexec the launch scripts run."""

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.forked import train
from tests.support.grids import params
from tests.support.paths import ROOT
from tests.support.pbs_servers import wait_for
from tests.support.programs import torch_python
from tests.support.runs import (
    DEEPSPEED,
    MPICH,
    hashes,
    launch,
    losses,
    make_run,
    prepare,
    summary,
    weights,
)
from tests.support.site_programs import program, rank
from tokamake import cli
from tokamake.runtime.process_group import free_port

MODULE = ("--module", "tokamake")


@pytest.mark.grid
@pytest.mark.ranks
def test_deepspeed_starts_the_same_run(tmp_path: Path) -> None:
    root = prepare(tmp_path)
    config, expected = (
        make_run(root, name, backend="deepspeed", zero_stage=2)
        for name in ("deepspeed", "expected")
    )
    printed = launch(config, ranks=2, launcher="deepspeed", program=MODULE)
    assert printed.count("layout    2 ranks = data 2 on cpu, fp32, deepspeed, ZeRO stage 2") == 1
    train(expected, ranks=2)
    assert summary(config)["world_size"] == 2
    for key in ("loss", "grad_norm", "validation_loss"):
        assert losses(config, key) == losses(expected, key)
    assert hashes(config) == hashes(expected)
    assert weights(config)


@pytest.mark.grid
@pytest.mark.ranks
def test_deepspeed_starts_each_host_of_a_hostfile_without_ssh(tmp_path: Path) -> None:
    """Both host names are this machine; each launcher starts the rank of its own host."""
    root = prepare(tmp_path)
    config, expected = (make_run(root, name, zero_stage=2) for name in ("hosts", "torchrun"))
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# comments and empty lines\n\nip-10-0-0-1 slots=1\nip-10-0-0-2 slots=1\n")
    line = [
        torch_python(), *DEEPSPEED, "--hostfile", str(hostfile), "--no_ssh",
        "--master_addr", "localhost", "--master_port", str(free_port()),
    ]  # fmt: skip
    command = ["--no_python", torch_python(), "-m", "tokamake", "train", "--config", str(config)]
    started = [
        subprocess.Popen(
            [*line, "--node_rank", str(number), *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], printed
    assert "layout    2 ranks = data 2 on cpu" in printed[0]
    train(expected, ranks=2)
    assert summary(config)["world_size"] == 2
    assert losses(config) == losses(expected)
    assert hashes(config) == hashes(expected)


@pytest.mark.parametrize("option", params(["--local_rank=1", "--local-rank=0"], ["--local_rank=1"]))
def test_the_local_rank_of_a_launcher_is_ignored(option: str) -> None:
    command = [torch_python(), "-m", "tokamake", option, "train", "--config", "none.yaml"]
    alone = {key: value for key, value in os.environ.items() if key != "RANK"}
    result = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    assert result.returncode == cli.EXIT_USER_ERROR
    assert "tokamake train: none.yaml: no such file" in result.stderr


def test_a_rank_alone_is_the_command_itself() -> None:
    script = str(ROOT / "profiles/local/launch.sh")
    shell = 'echo "$PPID ${RANK-no rank} $OMP_NUM_THREADS"; exit 83'
    environment = {**os.environ, "OMP_NUM_THREADS": "7"}
    result = subprocess.run(
        [script, "1", "1", "sh", "-c", shell],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.stdout == f"{os.getpid()} no rank 7\n"
    assert result.returncode == 83


RANK = """
import os, signal, sys
# Waited for, not handled: a signal between `ready` and the waiting would never wake it.
asked = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, asked)
os.write(1, b"ready\\n")  # one write; unbuffered print makes two
signal.sigwait(asked)
os.write(1, b"saved\\n")
sys.exit(80)
"""


EARLY = """
import os, runpy, signal, subprocess, sys
popen, started = subprocess.Popen, []
def dying(*arguments, **options):
    started.append(popen(*arguments, **options))
    if len(started) == 2:
        # Both ranks say so before the signal comes, which the launcher meets amid its start.
        os.write(1, sys.stdin.readline().encode())
        os.kill(os.getpid(), signal.SIGTERM)
    return started[-1]
subprocess.Popen = dying
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LAUNCHER = (str(ROOT / "profiles/local/ranks.py"), "2")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "early"),
    [
        *((signal.SIGTERM, False), (signal.SIGTERM, True)),
        *((signal.SIGINT, False), (signal.SIGUSR1, False)),
    ],
)
def test_the_local_launcher_forwards_signals_without_a_traceback(
    number: signal.Signals, early: bool
) -> None:
    before = ["-c", EARLY] if early else []
    command = [sys.executable, *before, *LAUNCHER, sys.executable, "-c", RANK]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        if not early:
            process.send_signal(number)
        out, err = process.communicate("signal\n" if early else None, timeout=300)
    assert out == "signal\n" * early + "saved\n" * 2
    assert "Traceback" not in err
    assert process.returncode == 80


HANGING = """
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"asked\\n"))
os.write(1, f"{os.getpid()}\\n".encode())
while True:
    time.sleep(60)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("early", [False, True])
def test_a_second_ctrl_c_kills_ranks_that_hang(early: bool) -> None:
    before = ["-c", EARLY.replace("SIGTERM", "SIGINT")] if early else []
    command = [sys.executable, *before, *LAUNCHER, sys.executable, "-c", HANGING]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        if early:
            process.stdin.write("signal\n")
            process.stdin.flush()
            assert process.stdout.readline() == "signal\n"
        else:
            process.send_signal(signal.SIGINT)
        assert [process.stdout.readline() for _ in range(2)] == ["asked\n"] * 2
        first = time.monotonic()  # the launcher has heard it
        wait_for(lambda: time.monotonic() - first > 1, "a second to pass")
        process.send_signal(signal.SIGINT)
        # Less than the ten minutes after which the launcher would kill them itself.
        out, err = process.communicate(timeout=300)
    assert (out, process.returncode) == ("", 130)
    assert "Traceback" not in err
    wait_for(lambda: not any(Path("/proc", str(rank)).exists() for rank in ranks), "no rank")


FAILING = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    sys.stdin.readline()
    sys.exit(7)
# Waited for, not handled, as above; with `deaf`, only SIGKILL ends this rank.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.write(1, b"ready\\n")
if sys.argv[1] == "deaf":
    time.sleep(600)
signal.sigwait({signal.SIGTERM})
os.write(1, b"asked\\n")
"""


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["listening", "deaf"])
def test_the_first_failure_ends_all_ranks_and_is_the_exit_status(kind: str) -> None:
    script = Path(LAUNCHER[0]).read_text()
    assert "SECONDS_AFTER_A_FAILURE = 30\n" in script
    script = script.replace("SECONDS_AFTER_A_FAILURE = 30\n", "SECONDS_AFTER_A_FAILURE = 1\n")
    command = [sys.executable, "-c", script, "2", sys.executable, "-c", FAILING, kind]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        out, err = process.communicate("now\n", timeout=300)
    assert (out, err) == ("asked\n" if kind == "listening" else "", "")
    assert process.returncode == 7


SITE = ["site", "--envall", "--line-buffer", "--np=2", "--ppn=2"]


def mpiexec(folder: Path, says: str) -> Path:
    return program(folder, "mpiexec", says)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Programs of a Python environment, tokamake and an mpiexec among them."""
    folder = mpiexec(tmp_path / "environment/bin", "environment")
    shutil.copy(folder / "mpiexec", folder / "tokamake")
    return folder


def test_a_command_that_does_not_exist_is_one_line() -> None:
    command = [sys.executable, ROOT / "profiles/local/ranks.py", "2", "tokamakke", "train"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "tokamakke: No such file or directory; is its environment active?\n"


@pytest.mark.parametrize("profile", ["aurora", "polaris", "sunspot"])
def test_ranks_are_started_by_the_sites_mpiexec(
    tmp_path: Path, environment: Path, profile: str
) -> None:
    """As in jobs, tokamake's environment is first on PATH."""
    site, other = mpiexec(tmp_path / "the site", "site"), mpiexec(tmp_path / "other", "other")
    done = rank(profile, environment, site, other)
    assert (done.stdout.splitlines()[: len(SITE)], done.stderr) == (SITE, "")


def test_links_to_the_environments_mpiexec_are_skipped(tmp_path: Path, environment: Path) -> None:
    site = mpiexec(tmp_path / "site", "site")
    (tmp_path / "folder").symlink_to(environment)
    for name in ("links", "tokamake"):
        (tmp_path / name).mkdir()
    (tmp_path / "links/mpiexec").symlink_to(environment / "mpiexec")
    (tmp_path / "tokamake/tokamake").symlink_to(environment / "tokamake")
    for path in (
        [tmp_path / "folder"],  # a link to its folder
        [tmp_path / "tokamake", tmp_path / "links"],  # links to its programs
        [tmp_path / "tokamake", environment],
        [mpiexec(tmp_path / "tokamake", "beside the link")],
    ):
        assert rank("aurora", *path, site).stdout.splitlines()[0] == "site"


def test_the_mpiexec_of_the_active_environment_is_skipped(
    tmp_path: Path, environment: Path
) -> None:
    site, active = mpiexec(tmp_path / "site", "site"), mpiexec(tmp_path / "active/bin", "active")
    path = (active, environment, site)
    assert rank("aurora", *path).stdout.splitlines()[0] == "active"
    (tmp_path / "link").symlink_to(active.parent)
    for name in (active.parent, tmp_path / "link"):
        done = rank("aurora", *path, VIRTUAL_ENV=str(name))
        assert done.stdout.splitlines()[0] == "site"


def test_an_mpiexec_that_the_environment_links_to_is_skipped(
    tmp_path: Path, environment: Path
) -> None:
    site, other = mpiexec(tmp_path / "site", "site"), mpiexec(tmp_path / "other", "other")
    (environment / "mpiexec").unlink()
    (environment / "mpiexec").symlink_to(other / "mpiexec")
    assert rank("aurora", environment, site).stdout.splitlines()[0] == "site"


def test_without_tokamake_on_path_the_first_mpiexec_is_taken(tmp_path: Path) -> None:
    assert rank("aurora", mpiexec(tmp_path / "site", "site")).stdout.splitlines()[0] == "site"


@pytest.mark.parametrize("profile", ["aurora", "polaris"])
@pytest.mark.parametrize("own", [True, False])
def test_a_missing_mpiexec_is_reported_in_one_line(
    environment: Path, profile: str, own: bool
) -> None:
    if not own:
        (environment / "mpiexec").unlink()
    done = rank(profile, environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{ROOT}/profiles/{profile}/launch.sh: no mpiexec on PATH outside tokamake's Python "
        "environment; load the module of the site's MPI in environment.sh beside this script\n"
    )


def test_mpich_is_outside_the_environment() -> None:
    """Otherwise its mpiexec and library would hide those of the site."""
    assert not list(metadata.distributions(name="mpich")), "run .venv/bin/pip uninstall mpich"
    assert (MPICH / "bin/mpiexec").exists(), "run make install"
