"""doctor on several ranks: missing, different and slow hosts, and wrong sums."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT
from tokamake.doctor import communication, hosts
from tokamake.doctor.communication import Measured
from tokamake.doctor.hosts import Facts
from tokamake.doctor.result import Result
from tokamake.runtime.process_group import free_port

GB = 2**30

FACTS = [
    Facts(rank, host, "3.11.2", "2.9.0", "0.1.0 (ab)" if rank % 2 == 0 else "", "cpu", (GB, GB))
    for rank, host in enumerate(["n1", "n1", "n2", "n2"])
]
MEASURED = [
    Measured(facts.host, True, latency=1e-4, reduce=1e-2, num_bytes=2**22, link=1e-3, device=1e-3)
    for facts in FACTS
]


def lines(results: list[Result]) -> list[str]:
    return [result.line for result in results]


def test_equal_hosts_are_ok() -> None:
    results = hosts.host_results(FACTS)
    assert lines(results)[0] == "ok       ranks: 4 on 2 hosts (n1: 2, n2: 2)"
    assert {result.state for result in results} == {"ok"}


@pytest.mark.parametrize("name", ["python", "torch", "tokamake", "device"])
def test_hosts_that_differ_are_named(name: str) -> None:
    odd = [replace(facts, **{name: "another"}) if facts.rank == 2 else facts for facts in FACTS]
    if name != "tokamake":
        odd[3] = replace(odd[3], **{name: "another"})
    (result,) = (result for result in hosts.host_results(odd) if result.state == "wrong")
    assert "another on n2" in result.value
    assert "on n1" in result.value


def test_a_low_limit_of_locked_memory() -> None:
    poor = [
        replace(facts, locked=(65536, 65536)) if facts.host == "n2" else facts for facts in FACTS
    ]
    assert hosts.host_results(poor)[-1].line.startswith("warning  locked memory, on n2: 65,536")
    endless = [replace(facts, locked=(-1, -1)) if facts.host == "n2" else facts for facts in FACTS]
    assert hosts.host_results(endless)[-1].state == "ok"


def test_changed_sources_change_the_version(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = hosts.sources(tmp_path)
    assert hosts.sources(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert hosts.sources(tmp_path) != before


def test_ranks_and_hosts_that_are_missing() -> None:
    result = hosts.missing_result(
        {0: "n1.site", 2: "n3"}, 4, expected=["n1", "n2", "n3", "n4"], seconds=120
    )
    assert result.value == (
        "2 of 4 connected within 120 s, rank 1, 3 did not; no rank of n2, n4 connected"
    )
    assert "no rank of" not in hosts.missing_result({0: "n1"}, 2, expected=[], seconds=5).value


def test_hosts_are_read_from_the_environment_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    assert hosts.expected_hosts({"PBS_NODEFILE": str(tmp_path / "nodes")}) == ["n1", "n2"]
    assert hosts.expected_hosts({"SLURM_STEP_NODELIST": "n[1-2]"}) == ["n1", "n2"]
    assert hosts.expected_hosts({}) == []


def test_a_host_is_slow_if_all_its_ranks_are() -> None:
    times = [("n1", 1.0), ("n1", 9.0), ("n1", 1.1), ("n2", 1.0), ("n3", 3.0), ("n3", 3.0)]
    # A single slow rank may be the neighbour of a slow host. On a slow host, all ranks are slow.
    assert hosts.slow_hosts(times, 2.0) == pytest.approx({"n3": 3.0 / 1.1})
    assert hosts.slow_hosts([("n1", 1.0)], 2.0) == {}
    result = hosts.slowness_result("links", "1 GB/s", slow={"n3": 2.7})
    assert result.line.startswith("warning  links: 1 GB/s; n3 takes 2.7 times as long as other")


def test_slow_and_wrong_measurements_are_reported() -> None:
    cpu = torch.device("cpu")
    results = communication.measured_results(MEASURED, cpu)
    assert {result.state for result in results} == {"ok"}
    assert "100 µs for 4 bytes; 0.63 GB/s per rank for 4 MB" in results[1].value
    slow = [
        replace(times, link=5e-3, device=2e-3) if times.host == "n2" else times
        for times in MEASURED
    ]
    states = {result.name: result.state for result in communication.measured_results(slow, cpu)}
    assert states["links"] == states["speed of devices"] == "warning"
    wrong = [replace(times, right=times.host == "n1") for times in MEASURED]
    assert lines(communication.measured_results(wrong, cpu))[0].startswith(
        "wrong    sums of the all-reduce: wrong on n2"
    )


def test_a_folder_that_a_host_does_not_see(tmp_path: Path) -> None:
    assert communication.folder_result(tmp_path, []).state == "ok"
    result = communication.folder_result(tmp_path, ["n2"])
    assert (result.state, f"{tmp_path} is not visible on n2") == ("wrong", result.value)


def rank(script: str, *arguments: str) -> list[str]:
    """Command of a rank that runs `script`, which changes facts, and then doctor."""
    main = "from tokamake.cli import main; main()"
    command = ["tokamake", "doctor", "--ranks", *arguments]
    return [sys.executable, "-c", f"import sys; sys.argv = {command!r}\n{script}\n{main}"]


def environment(number: int, port: int) -> dict[str, str]:
    return {
        **os.environ, "RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def run_two_ranks(folder: Path, script: str = "") -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of both ranks; the script changes rank 1."""
    port, pipe = free_port(), subprocess.PIPE
    processes = [
        subprocess.Popen(
            rank(script * number, "--timeout", "240", "--output", "report.json"),
            cwd=folder, env=environment(number, port), stdout=pipe, stderr=pipe, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=600) for process in processes]
    return [
        (process.returncode, *output) for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.ranks
def test_two_ranks_agree_and_one_reports(tmp_path: Path) -> None:
    script = ROOT / "profiles/local/launch.sh"
    command = [script, "1", "2", "tokamake", "doctor", "--ranks", "--output", "report.json"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("sums of the all-reduce: correct on 2 ranks, cpu\n") == 1
    assert "ok       ranks: 2 on 1 host" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["state"] != "wrong"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param(
            "import socket; socket.gethostname = lambda: 'n2'\n"
            "import platform; platform.python_version = lambda: '3.12.9'",
            "wrong    Python on hosts: ",
            marks=pytest.mark.grid,
        ),
        pytest.param(
            "import socket; socket.gethostname = lambda: 'n2'\n"
            "import torch; torch.__version__ = '2.1.0'",
            "wrong    torch on hosts: ",
            marks=pytest.mark.grid,
        ),
        pytest.param(
            "import tokamake.doctor.communication as c, torch; equal = torch.equal\n"
            "import socket; socket.gethostname = lambda: 'n2'\n"
            "c.torch.equal = lambda a, b: equal(a + 1, b)",
            "wrong    sums of the all-reduce: wrong on n2",
            marks=pytest.mark.grid,
        ),
    ],
)
def test_a_rank_that_differs_is_named(tmp_path: Path, script: str, message: str) -> None:
    (first, out, err), (second, second_out, _) = run_two_ranks(tmp_path, script)
    assert (first, second, second_out) == (1, 0, ""), err
    (line,) = (line for line in out.splitlines() if line.startswith("wrong"))
    assert line.startswith(message)
    assert " n2" in line
    assert ("all-reduce" in out) == ("torch on hosts" not in line)


@pytest.mark.grid
@pytest.mark.ranks
def test_a_missing_rank_is_reported(tmp_path: Path) -> None:
    def run_rank(number: int, **more: str) -> subprocess.CompletedProcess[str]:
        port = free_port()
        return subprocess.run(
            rank("", "--timeout", "2"), cwd=tmp_path, capture_output=True,
            env={**environment(number, port), **more}, text=True, check=False, timeout=600,
        )  # fmt: skip

    (tmp_path / "nodes").write_text("n7\nn8\n")
    process = run_rank(0, PBS_NODEFILE=str(tmp_path / "nodes"))
    assert process.returncode == 1
    assert (
        "wrong    ranks: 1 of 2 connected within 2 s, rank 1 did not; no rank of n7, n8 connected"
        in process.stdout
    )
    process = run_rank(1)
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert "rank 1 on " in line
    assert ": cannot reach rank 0 at localhost:" in line


HANGING = """
import sys
from tokamake.doctor.watch import watched
with watched(float(sys.argv[1]), "the first step hangs") as watch:
    print("first", flush=True)
    sys.stdin.readline()
    watch.begin("the second step hangs")
    print("second", flush=True)
    sys.stdin.readline()
print("done")
"""
CLOCK = """
import os, sys
from select import select
from tokamake.doctor import watch
class Clock:
    def select(pipes, _, __, seconds):
        assert seconds == float(sys.argv[1])
        while True:
            late = os.path.exists("late")
            ready = select(pipes, [], [], 0.02)
            if ready[0] or late:
                return ready
watch.select = Clock
"""
"""A step times out when the file `late` exists."""


def test_a_hanging_step_is_killed_with_its_message(tmp_path: Path) -> None:
    def run(script: str, seconds: str, *printed: str) -> tuple[int, str, str]:
        """Answer each of these lines; after the last line, let the step time out."""
        with subprocess.Popen(
            [sys.executable, "-c", script, seconds], stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            for number, line in enumerate(printed, 1):
                assert process.stdout.readline() == line
                if number < len(printed):
                    process.stdin.write("\n")
                    process.stdin.flush()
            (tmp_path / "late").touch()
            out, errors = process.stdout.read(), process.stderr.read()
            return process.wait(), out, errors

    assert run(CLOCK + HANGING, "5", "first\n") == (-9, "", "the first step hangs\n")
    (tmp_path / "late").unlink()
    killed = (-9, "", "the second step hangs\n")
    assert run(CLOCK + HANGING, "5", "first\n", "second\n") == killed
    assert run(HANGING, "600", "first\n", "second\n", "done\n") == (0, "", "")
    code, _, errors = run(HANGING, "0.2")  # it may be killed before its first line
    assert (code, errors) == (-9, "the first step hangs\n")
