"""Rendezvous of ranks, ports, devices and cores of a process group."""

import os
import socket
from pathlib import Path

import pytest

from tokamake.errors import UserError
from tokamake.runtime import process_group as runtime_process_group
from tokamake.runtime.process_group import (
    check_devices,
    free_port,
    meeting,
    process_group,
    static_ports,
)
from tokamake.runtime.ranks import Ranks

SLURM_STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_JOB_ID": "12",
}


def test_slurm_ranks_meet_at_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in SLURM_STEP.items():
        monkeypatch.setenv(name, value)
    runtime_process_group._rendezvous(Ranks(3, 4, 1, 2))
    assert os.environ["MASTER_ADDR"] == "n07"
    assert 1024 < int(os.environ["MASTER_PORT"]) < 32768


def test_a_port_in_use_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        match = rf"cannot meet at localhost:{port}: .*; set MASTER_ADDR"
        with pytest.raises(UserError, match=match), process_group(Ranks(0, 2, 0, 2)):
            pass
        socket.create_connection(("localhost", port)).close()


@pytest.mark.parametrize("port", ["abc", "", "0", "65536", "-1", "29500 "])
def test_an_invalid_port_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", port)
    ranks = Ranks(0, 2, 0, 2)
    with pytest.raises(UserError, match=f"MASTER_PORT={port}: not a port, which is a number"):
        meeting(ranks, 1)
    with pytest.raises(UserError, match="not a port"), process_group(ranks):
        pass


def test_a_free_port_is_outside_the_assigned_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "range"
    path.write_text("20000\t60999\n")
    assert static_ports(path) == [*range(15000, 20000), *range(61000, 65536)]
    assert static_ports(tmp_path / "none") == [*range(15000, 32768), *range(61000, 65536)]
    path.write_text("1024 65535\n")
    assert static_ports(path) == []
    assert free_port() in static_ports()
    with socket.socket() as listener:
        listener.bind(("", 0))
        taken = listener.getsockname()[1]
        for ports in ([taken], []):
            monkeypatch.setattr(runtime_process_group, "static_ports", lambda ports=ports: ports)
            assert free_port() not in (0, taken)


def test_bound_ranks_share_cores_only_with_ranks_on_the_same_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    import torch.distributed as dist

    def gather(values: list[object], value: tuple[str, set[int]]) -> None:
        host, cores = value
        values[:] = [value, value, (host, {50, 51}), ("another", cores)]

    num_threads_set: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch, "set_num_threads", num_threads_set.append)
    runtime_process_group._share_cores()
    assert num_threads_set == [6]


def test_a_process_group_of_one_can_be_opened_again() -> None:
    import torch
    import torch.distributed as dist

    for _ in range(2):
        with process_group(Ranks(0, 1, 0, 1)) as device:
            values = torch.ones(1, device=device)
            dist.all_reduce(values)
            assert values.item() == 1
        assert not dist.is_initialized()


def test_two_ranks_on_one_device_are_refused() -> None:
    check_devices([("a", "0"), ("a", "1"), ("b", "0")])
    with pytest.raises(UserError, match="ranks 1 and 2 have the same device of b: start no more"):
        check_devices([("a", "0"), ("b", "0"), ("b", "0")])
