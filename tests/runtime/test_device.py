"""The memory that a rank may use of its device, and the note about a broken device."""

import math
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import spawn
from tests.support.runs import make_run, prepare
from tokamake.errors import FAULTY_HOSTS_VARIABLE
from tokamake.inference.layout import peers
from tokamake.runtime import device
from tokamake.runtime.device import noted_device_faults
from tokamake.runtime.ranks import Ranks
from tokamake.train.train import train


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the executor for Slurm looks for faulty hosts."""
    monkeypatch.setenv(FAULTY_HOSTS_VARIABLE, str(tmp_path / "faulty"))
    monkeypatch.setenv("SLURMD_NODENAME", "nid0042")
    return tmp_path / "faulty"


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be",
        "NCCL error: Cuda failure 'uncorrectable NVLink error detected during the execution'",
        "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        "ZE_RESULT_ERROR_DEVICE_LOST",
    ],
)
def test_a_broken_device_is_noted_with_its_host(
    faulty: Path, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks.find()
    with (
        pytest.raises(RuntimeError, match=r"ERROR|error"),
        noted_device_faults(ranks),
        noted_device_faults(ranks),
    ):
        raise RuntimeError(message)
    assert faulty.read_text() == "nid0042\n"
    printed = capsys.readouterr().err
    assert printed.count("rank 0 on nid0042: its device is faulty: ") == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error: unhandled system error"),
        RuntimeError("CUDA out of memory"),
        ValueError("uncorrectable ECC error"),
    ],
)
def test_an_error_of_the_program_or_of_a_peer_is_not(faulty: Path, error: Exception) -> None:
    with pytest.raises(type(error)), noted_device_faults(Ranks.find()):
        raise error
    assert not faulty.exists()


@pytest.mark.usefixtures("lone_rank")
def test_training_notes_it(
    tmp_path_factory: pytest.TempPathFactory, faulty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURMD_NODENAME")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    config = make_run(prepare(tmp_path_factory.mktemp("broken")), "run", backend="native")
    monkeypatch.setattr("tokamake.train.backends.native.Engine.train_step", broken)
    with pytest.raises(RuntimeError, match="ECC"):
        train(config=config)
    assert faulty.read_text() == f"{socket.gethostname()}\n"


@pytest.mark.usefixtures("lone_rank")
def test_one_rank_of_inference_notes_it(faulty: Path) -> None:
    with pytest.raises(RuntimeError, match="ECC"), peers():
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    assert faulty.read_text() == "nid0042\n"


def broken_rank(faulty: Path) -> str:
    """What a rank of two notes whose second one has a broken device."""
    os.environ[FAULTY_HOSTS_VARIABLE] = str(faulty)
    rank = dist.get_rank()
    os.environ |= {"SLURMD_NODENAME": f"nid{rank}", "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    error = "UR_RESULT_ERROR_DEVICE_LOST" if rank else "a peer has closed the connection"
    with pytest.raises(RuntimeError, match=error), peers():
        raise RuntimeError(error)
    return faulty.read_text() if rank else ""


@pytest.mark.ranks
def test_of_several_ranks_of_inference_only_the_broken_one_notes_it(tmp_path: Path) -> None:
    assert spawn(broken_rank, 2, tmp_path / "faulty") == ["", "nid1\n"]


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_cgroup_limits", lambda: [6e6])
    shares = [
        device.device_memory(torch.device("cpu"), Ranks(0, 2, 0, local_size))
        for local_size in (1, 2)
    ]
    assert shares == [6e6, 3e6]


def test_control_groups_limit_the_memory_of_the_host(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert min(device._cgroup_limits(tmp_path)) == math.inf
    write("proc/self/cgroup", "0::/slurm/job_7\n")
    write("sys/fs/cgroup/slurm/job_7/memory.max", "max\n")
    write("sys/fs/cgroup/slurm/memory.max", "16000000000\n")
    assert min(device._cgroup_limits(tmp_path)) == 16e9
    write("proc/self/cgroup", "5:cpu:/x\n4:memory:/slurm/job_7\n")
    write("sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", "8000000000\n")
    assert min(device._cgroup_limits(tmp_path)) == 8e9
