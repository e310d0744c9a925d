"""The launcher is killed: its ranks train on, and no second trainer comes between."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.faults import Inject
from tests.support.forked import train
from tests.support.interrupted_runs import assert_same_end
from tests.support.programs import torch_python
from tests.support.runs import make_run

RANKS = 2


def descendants(pid: int) -> set[int]:
    """Processes below a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children}.union(*(descendants(int(c)) for c in children))


def wait_for(path: Path) -> None:
    end = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.fault("kill of the launcher")
def test_ranks_whose_launcher_was_killed_keep_their_lock(root: Path, inject: Inject) -> None:
    expected, config = make_run(root, "whole"), make_run(root, "orphaned")
    train(expected, ranks=RANKS)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    train_command = ["-m", "tokamake", "train", f"--config={config}"]
    command = [*torchrun, f"--nproc-per-node={RANKS}", *train_command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with config.with_name("printed").open("w") as printed:
        launcher = subprocess.Popen(
            command, env=environment, stdout=printed, stderr=subprocess.STDOUT
        )
    wait_for(config.parent / "training/global_step2")
    orphans = descendants(launcher.pid)
    for pid in orphans:
        os.kill(pid, signal.SIGSTOP)  # so that they still train when the second one begins
    try:
        inject()
        launcher.kill()
        launcher.wait()
        second = [torch_python(), *train_command]
        refused = subprocess.run(second, env=environment, capture_output=True, text=True)
    finally:
        for pid in orphans:
            os.kill(pid, signal.SIGCONT)
    assert refused.returncode == 2, refused.stderr
    assert "another process trains there; end it (pid " in refused.stderr
    end = time.monotonic() + 300
    while any(Path(f"/proc/{pid}/exe").exists() for pid in orphans):
        assert time.monotonic() < end
        time.sleep(0.05)
    train(config, ranks=RANKS)
    assert_same_end(config, expected)
    print(config.with_name("printed").read_text())
