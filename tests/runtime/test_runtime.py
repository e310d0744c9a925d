"""Ranks under every launcher, rendezvous, threads, errors across ranks, progress lines."""

import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokamake.errors import TemporaryError, UserError
from tokamake.runtime import console, rank_errors, ranks
from tokamake.runtime import process_group as runtime_process_group
from tokamake.runtime.console import progress
from tokamake.runtime.cores import num_threads
from tokamake.runtime.process_group import (
    check_devices,
    free_port,
    meeting,
    process_group,
    static_ports,
)
from tokamake.runtime.rank_errors import (
    raise_on_all_ranks,
    report_from_any_rank,
    report_from_rank_0,
)
from tokamake.runtime.ranks import Ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("environment", [TORCHRUN, DEEPSPEED, OPEN_MPI, MPICH, PALS, SRUN])
def test_ranks_are_read_under_each_launcher(environment: dict[str, str]) -> None:
    assert Ranks.find(environment) == Ranks(rank=3, world_size=4, local_rank=1, local_size=2)


def test_mpi_is_used_if_only_the_rank_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        rank, size = 3, 4

        def Split_type(self, kind: str) -> SimpleNamespace:
            assert kind == "shared"
            return SimpleNamespace(rank=1, size=2)

    mpi = SimpleNamespace(COMM_WORLD=World(), COMM_TYPE_SHARED="shared")
    monkeypatch.setattr(ranks, "mpi", lambda: mpi)
    assert Ranks.find({"PMIX_RANK": "3"}) == Ranks(3, 4, 1, 2)


@pytest.mark.parametrize("environment", [{}, SBATCH])
def test_a_single_process_has_no_launcher(environment: dict[str, str]) -> None:
    assert Ranks.find(environment) == Ranks(rank=0, world_size=1, local_rank=0, local_size=1)


def test_mpiexec_inside_a_slurm_step_counts_its_own_ranks() -> None:
    proxy = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert Ranks.find({**proxy, **MPICH}).rank == 3


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "many"), ("RANK", "4")])
def test_broken_variables_are_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name}={value}"):
        Ranks.find({**TORCHRUN, name: value})


def test_slurm_ranks_meet_at_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {**SRUN, "SLURM_STEP_NODELIST": "n[07-08]", "SLURM_JOB_ID": "12"}.items():
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


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert num_threads(4, {}) == 3
    assert num_threads(4, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}) == 3
    assert num_threads(4, {"OMP_NUM_THREADS": "1"}) is None
    assert num_threads(4, {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}) is None
    assert num_threads(64, {}) == 1


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


def test_only_rank_0_reports_a_common_error(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(rank_errors, "time", SimpleNamespace(sleep=waited.append))
    with pytest.raises(UserError, match=r"^broken$"), report_from_rank_0(Ranks(0, 2, 0, 2)):
        raise UserError("broken")
    assert not waited
    with pytest.raises(SystemExit) as caught, report_from_rank_0(Ranks(1, 2, 1, 2)):
        raise UserError("broken")
    assert caught.value.code == 2
    assert waited


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    ranks = Ranks(0, 1, 0, 1)
    with process_group(ranks):
        with pytest.raises(UserError, match=r"^broken$") as caught, raise_on_all_ranks():
            raise UserError("broken")
        assert type(caught.value) is UserError
        message = "^file: No space left on device; fix it and rerun$"
        with pytest.raises(TemporaryError, match=message), raise_on_all_ranks():
            raise OSError(errno.ENOSPC, "No space left on device", "file")
        with pytest.raises(UserError, match=r"^TimeoutError; fix it"), raise_on_all_ranks():
            raise TimeoutError
        with raise_on_all_ranks():
            pass


def damaged() -> Iterator[int]:
    yield 1
    raise UserError("a.bin: damaged")


def test_an_error_on_one_rank_only_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        items = report_from_any_rank(damaged(), Ranks(rank, 2, rank, 2))
        assert next(items) == 1
        with pytest.raises(UserError):
            next(items)
    assert capsys.readouterr().err == "tokamake: rank 1: a.bin: damaged\n"


def test_a_log_gets_few_progress_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=clock.__next__))
    assert list(progress([5, 6, 7, 8], label="reading", unit="files")) == [5, 6, 7, 8]
    assert capsys.readouterr().err.splitlines() == [
        "reading: 2/4 (50%) files",
        "reading: 4/4 (100%) files",
    ]


def test_progress_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress(iter([1, 2]), label="reading", total=2)) == [1, 2]
    assert "reading" in capsys.readouterr().err


def test_two_ranks_on_one_device_are_refused() -> None:
    check_devices([("a", "0"), ("a", "1"), ("b", "0")])
    with pytest.raises(UserError, match="ranks 1 and 2 have the same device of b: start no more"):
        check_devices([("a", "0"), ("b", "0"), ("b", "0")])
