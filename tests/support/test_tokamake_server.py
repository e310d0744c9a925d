"""Jobs in forks of a server are like processes of their own."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import tokamake_server
from tests.support.pbs_servers import wait_for
from tokamake.runtime.exit_status import Stopped


def client(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start `tokamake` of the environment."""
    program = tokamake_server.programs().with_name("tokamake")
    environment = {**os.environ, tokamake_server.VARIABLE: tokamake_server.address(), **variables}
    return subprocess.Popen(
        [program, *arguments], cwd=folder, env=environment, text=True,
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


def test_other_commands_need_no_server(tmp_path: Path) -> None:
    shown = client(tmp_path, "--version", **{tokamake_server.VARIABLE: "nowhere"})
    out, err = shown.communicate(timeout=60)
    assert (shown.returncode, err) == (0, "")
    assert out.count(".") == 2


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
