"""The process group of a run: rendezvous of its ranks, their communication, their devices."""

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import TemporaryError, UserError
from tokamake.runtime.cores import num_threads
from tokamake.runtime.device import accelerators, noted_device_faults
from tokamake.runtime.device_types import device_type
from tokamake.runtime.rank_errors import report_from_rank_0
from tokamake.runtime.ranks import Ranks, mpi, variable
from tokamake.scheduler_formats import hosts_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

_MAX_FULL_MESH = 128
"""Ranks that may all be connected with each other."""


def choose_device(ranks: Ranks) -> "torch.device":
    """Choose the device of this rank: an accelerator if available, else the CPU."""
    import torch

    for kind, module in accelerators():
        # Some launchers show each rank only its own device, as number 0.
        device = torch.device(kind, ranks.local_rank % module.device_count())
        module.set_device(device)
        return device
    return torch.device("cpu")


@contextmanager
def joined(ranks: Ranks) -> Iterator["torch.device"]:
    """Join the ranks of a command and yield this rank's device; leave the ranks on exit.

    Rank 0 reports a `UserError` that all ranks raise. A host whose device reports that it is broken
    is noted for the next job. For errors see `process_group`.
    """
    with (
        report_from_rank_0(ranks),
        noted_device_faults(ranks),  # of the start of the process group
        process_group(ranks) as device,
        # Its end may hang with a broken device, so faults of the work are noted before.
        noted_device_faults(ranks),
    ):
        yield device


@contextmanager
def process_group(ranks: Ranks, store: "Store | None" = None) -> Iterator["torch.device"]:
    """Join torch's process group and yield this rank's device; leave the group on exit.

    Inside another `process_group`, use that one.

    Peers meet at MASTER_ADDR and MASTER_PORT if they are set, else at an address from Slurm's
    variables or from an MPI broadcast. A single process needs no address.

    Args:
        store: a store from `meeting`, if the peers have met already.

    Raises:
        UserError: MPI does not see the peers that the launcher started, the port is taken, or two
            ranks have the same device.
    """
    import torch.distributed as dist

    device = choose_device(ranks)
    if dist.is_initialized():
        yield device
        return
    backend = device_type(device).backend
    if ranks.world_size > _MAX_FULL_MESH:
        # By default, each rank of a gloo group opens a connection to each other rank.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # DeepSpeed reads the index of the device from this variable.
    os.environ["LOCAL_RANK"] = str(ranks.local_rank)
    if ranks.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif store is not None:
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size)
    else:
        _rendezvous(ranks)
        _join(backend, ranks)
    try:
        if device.type == "cpu":
            _share_cores()
        elif (identity := device_type(device).identity) is not None:
            _compare_devices(identity(device))
        yield device
        dist.barrier(device_ids=None if device.type == "cpu" else [device.index])
    except UserError as error:
        error.among_ranks = True
        raise
    finally:
        dist.destroy_process_group()


def meeting(ranks: Ranks, seconds: float) -> "Store":
    """Open a key-value store that all peers share, within a number of seconds.

    Rank 0 serves it. Other ranks wait for rank 0; rank 0 does not wait for them.
    """
    import torch.distributed as dist

    if ranks.world_size == 1:
        return dist.HashStore()
    _rendezvous(ranks)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun itself serves a store there.
    is_server = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=is_server,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0].rstrip(". ")
        raise TemporaryError(
            f"rank {ranks.rank} on {socket.gethostname()}: cannot reach rank 0 at {host}:{port} "
            f"within {seconds:g} s: {reason}; look at that host, or set MASTER_ADDR and MASTER_PORT"
        ) from None


def _rendezvous(ranks: Ranks) -> None:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(ranks.rank), str(ranks.world_size)
    if "MASTER_ADDR" in os.environ:
        _check_port(os.environ.setdefault("MASTER_PORT", "29500"))
        return
    tasks = variable(os.environ, "SLURM_STEP_NUM_TASKS")
    if tasks == ranks.world_size and "SLURM_STEP_NODELIST" in os.environ:
        # Ranks cannot exchange a free port without MPI, so each job and step has its own port.
        job, step = (variable(os.environ, f"SLURM_{name}_ID") or 0 for name in ("JOB", "STEP"))
        host, port = (
            hosts_of(os.environ["SLURM_STEP_NODELIST"])[0],
            15000 + (job * 7 + step) % 15000,
        )
    else:
        host, port = _agree_through_mpi(ranks)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)


def _check_port(value: str) -> None:
    if not (value.isascii() and value.isdecimal() and 0 < int(value) < 65536):
        raise UserError(
            f"MASTER_PORT={value}: not a port, which is a number from 1 to 65535; set it to one "
            "that is free on the first host, or unset it"
        )


def _join(backend: str, ranks: Ranks) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group(
            backend, init_method="env://", rank=ranks.rank, world_size=ranks.world_size
        )
    except dist.DistNetworkError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).split("\n")[0]
        raise TemporaryError(
            f"ranks cannot meet at {address}: {reason}; set MASTER_ADDR to the first host and "
            "MASTER_PORT to a port that is free there"
        ) from None


def _agree_through_mpi(ranks: Ranks) -> tuple[str, int]:
    world = mpi().COMM_WORLD
    if world.size != ranks.world_size:
        raise UserError(
            f"MPI sees {world.size} processes, the launcher started {ranks.world_size}; "
            "set MASTER_ADDR and MASTER_PORT, or install the mpi4py of this launcher's MPI"
        )
    address: tuple[str, int] = world.bcast(
        (socket.gethostname(), free_port()) if ranks.rank == 0 else None
    )
    return address


def free_port() -> int:
    """Find a free port of this host.

    Ports outside the range from which the system assigns ports come first: no other program gets
    them before this one uses them.
    """
    static = static_ports() or [0]
    for port in (*(secrets.choice(static) for _ in range(20)), 0):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            number: int = listener.getsockname()[1]
            return number
    raise TemporaryError(
        f"no port is free on {socket.gethostname()}; end programs that hold ports there"
    )


def static_ports(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> list[int]:
    """Ports from 15000 on that Linux does not assign automatically."""
    try:
        first, last = map(int, path.read_text().split())
    except (OSError, ValueError):
        first, last = 32768, 60999  # Linux's default
    return [port for port in range(15000, 65536) if not first <= port <= last]


def _share_cores() -> None:
    """Set this rank's number of threads.

    A launcher may bind each rank to its own cores, or all ranks of a host to all cores.
    """
    import torch
    import torch.distributed as dist

    cores = (socket.gethostname(), os.sched_getaffinity(0))
    cores_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(cores_of_ranks, cores)
    threads = num_threads(cores_of_ranks.count(cores))
    if threads:
        torch.set_num_threads(threads)


def _compare_devices(identity: str) -> None:
    import torch.distributed as dist

    # Not nccl, which fails if two ranks have the same device.
    group = dist.new_group(backend="gloo")
    owner = (socket.gethostname(), identity)
    owners: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(owners, owner, group=group)
    check_devices(owners)


def check_devices(owners: Sequence[tuple[str, str]]) -> None:
    """Check that no two ranks have the same host and device UUID."""
    first_ranks: dict[tuple[str, str], int] = {}
    for rank, owner in enumerate(owners):
        if (first := first_ranks.setdefault(owner, rank)) != rank:
            raise UserError(
                f"ranks {first} and {rank} have the same device of {owner[0]}: start no more ranks "
                "a host than it has devices, or hide these (CUDA_VISIBLE_DEVICES=) to train on CPUs"
            )
