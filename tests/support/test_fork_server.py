"""Forks of servers are like processes of their own."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.pbs_servers import wait_for
from tests.support.programs import programs
from tokamake.runtime.exit_status import Stopped


def client(
    folder: Path, *arguments: str, program: str = "tokamake", files: tuple[int, ...] = ()
) -> subprocess.Popen[str]:
    """Start a program of the environment."""
    return subprocess.Popen(
        [programs("tokamake") / program, *arguments], cwd=folder, text=True, pass_fds=files,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_output_and_exit_status_are_those_of_the_command(tmp_path: Path) -> None:
    refused = client(tmp_path, "train", "--config", "none.yaml")
    out, err = refused.communicate(timeout=60)
    assert (out, refused.returncode) == ("", 2)
    assert err == "tokamake train: none.yaml: no such file; make it with `tokamake resolve`\n"
    helped = client(tmp_path, "generate", "--help")
    out, err = helped.communicate(timeout=60)
    assert (helped.returncode, err) == (0, "")
    assert "tokamake generate --checkpoint" in out


SHOWN = "import os, sys; print(__name__, sys.argv, 'torch' in sys.modules, os.getcwd())"


def test_python_runs_a_program_a_module_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    for arguments, shown in (
        (["-B", "-c", SHOWN, "a"], ["-c", "a"]),
        (["-m", "shown", "a"], [str(tmp_path / "shown.py"), "a"]),
        ([str(tmp_path / "shown.py"), "-c"], [str(tmp_path / "shown.py"), "-c"]),
    ):
        out, err = client(tmp_path, *arguments, program="torch-python").communicate(timeout=60)
        assert (out, err) == (f"__main__ {shown} True {tmp_path}\n", "")


def test_a_fork_has_the_open_files_of_the_client(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    program = f"import os; os.write({writing}, b'written')"
    process = client(tmp_path, "-c", program, program="torch-python", files=(writing,))
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"written"  # to its end: neither client nor server has the file
    assert process.communicate(timeout=60) == ("", "")


def test_a_client_that_is_killed_before_it_asks_disturbs_nothing(tmp_path: Path) -> None:
    server = programs("tokamake").parent.with_name("tokamake_server")
    for sent in (b"", (100).to_bytes(4, "little") + b"[1"):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.connect(str(server))
            killed.sendall(sent)
    process = client(tmp_path, "-c", "print(1)", program="torch-python")
    assert process.communicate(timeout=60) == ("1\n", "")


def num_working(folder: Path) -> int:
    """Number of processes in a folder: a client and its fork."""
    number = 0
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended
            number += path.readlink() == folder
    return number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_end_the_fork(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "run.yaml")  # a train that waits for its config
    waiting = client(tmp_path, "train", "--config", "run.yaml")
    wait_for(lambda: num_working(tmp_path) == 2, "the fork")
    waiting.send_signal(number)
    waiting.communicate(timeout=60)
    # The fork may not have set its handlers yet.
    assert waiting.returncode in (-number, Stopped.SIGTERM)
    wait_for(lambda: not num_working(tmp_path), "its end")
