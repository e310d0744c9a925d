"""The memory that a rank may use of its device."""

import math
from pathlib import Path

import pytest
import torch

from tokamake.runtime import device_memory
from tokamake.runtime.device_memory import _cgroup_limits
from tokamake.runtime.ranks import Ranks


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_cgroup_limits", lambda: [6e6])
    shares = [
        device_memory.device_memory(torch.device("cpu"), Ranks(0, 2, 0, local_size))
        for local_size in (1, 2)
    ]
    assert shares == [6e6, 3e6]


def test_control_groups_limit_the_memory_of_the_host(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert min(_cgroup_limits(tmp_path)) == math.inf
    write("proc/self/cgroup", "0::/slurm/job_7\n")
    write("sys/fs/cgroup/slurm/job_7/memory.max", "max\n")
    write("sys/fs/cgroup/slurm/memory.max", "16000000000\n")
    assert min(_cgroup_limits(tmp_path)) == 16e9
    write("proc/self/cgroup", "5:cpu:/x\n4:memory:/slurm/job_7\n")
    write("sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", "8000000000\n")
    assert min(_cgroup_limits(tmp_path)) == 8e9
