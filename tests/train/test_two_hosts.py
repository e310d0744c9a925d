"""Two hosts simulated on one machine: each has its own network and name; a cable joins them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.runs import losses, make_run, prepare, summary

NAMES = ("ip-10-99-0-1", "ip-10-99-0-2")
ADDRESSES = ("10.99.0.1", "10.99.0.2")

# A host exists as long as its process; `read` ends when the test closes its end of the pipe.
HOST = (
    "hostname {name} && mount --bind {hosts} /etc/hosts && ip link set lo up && echo up && read x"
)


def obstacle() -> str:
    """Reason why this machine cannot simulate hosts; empty: it can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "mount") if not shutil.which(name)]
    if missing:
        return f"no {', '.join(missing)}"
    attempt = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "x", "type", "veth"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"cannot create networks: {attempt.stderr.strip()}" if attempt.returncode else ""


OBSTACLE = obstacle()
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Command prefix of each host."""
    known = tmp_path / "hosts"
    lines = [f"{address} {name}" for name, address in zip(NAMES, ADDRESSES, strict=True)]
    known.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    with ExitStack() as stack:
        pids = []
        for name in NAMES:
            script = HOST.format(name=name, hosts=known)
            process = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-c", script],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(process)  # closes its pipe at the end, which ends it
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            pids.append(str(process.pid))
        first, second = pids
        ends = ["cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second]
        subprocess.run(["ip", "link", "add", *ends], check=True)
        entered = [["nsenter", "--target", pid, "--net", "--uts", "--mount"] for pid in pids]
        for enter, address in zip(entered, ADDRESSES, strict=True):
            subprocess.run(
                [*enter, "ip", "addr", "add", f"{address}/24", "dev", "cable"], check=True
            )
            subprocess.run([*enter, "ip", "link", "set", "cable", "up"], check=True)
        yield entered


@pytest.mark.grid
def test_two_hosts_meet_by_name_and_equal_one_process(
    hosts: list[list[str]], tmp_path: Path
) -> None:
    config = make_run(prepare(tmp_path), "run", train_steps=3, zero_stage=2)
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")), "--nnodes=2", "--nproc-per-node=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={NAMES[0]}:29400", "--rdzv-id=test",
        "--no-python", "sh", "-c", 'hostname >&2; exec "$0" -m tokamake train --config "$1"',
        sys.executable, str(config),
    ]  # fmt: skip
    started = [
        subprocess.Popen(
            [*enter, *torchrun], env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for enter in hosts
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], printed
    assert all(name in text for name, text in zip(NAMES, printed, strict=True))
    assert summary(config)["world_size"] == 2
    assert len(losses(config, "loss")) == 3
