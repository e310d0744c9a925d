"""Where this process stands among its peers: rank, device, process group, progress on the console.

Reads the environment that torchrun, deepspeed, srun or mpiexec (MPICH, Intel MPI, PALS, Open MPI)
made, if any did; gives ranks and a device to stages. torch and mpi4py are imported only where they
are used.
"""

import ctypes
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from tokamake.batch_systems import hosts_of
from tokamake.errors import UserError, of_system

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

Item = TypeVar("Item")

STOPPED = 75
"""Exit code of a run that was asked to stop before its end: EX_TEMPFAIL of sysexits.h."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
"""What ranks talk through, by the kind of device."""

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun; deepspeed has LOCAL_SIZE
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),  # HPE PALS
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("PMIX_RANK", "PMIX_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)
"""Variables of rank, world size, local rank and local size; the first complete set counts."""

_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
"""Only srun sets these for a step; a batch script has SLURM_PROCID and SLURM_NTASKS too."""


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    """Number of this process, 0 to world_size - 1."""
    world_size: int
    """Processes of the run."""
    local_rank: int
    """Number of this process on its host."""
    local_size: int
    """Processes on this host."""

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> "Ranks":
        """Read the launcher's variables; MPI is asked where they tell the rank only.

        Raises:
            UserError: a variable is no number, or rank and size do not fit.
        """
        found = [
            names
            for names in (*_LAUNCHERS, _SLURM)
            if names[0] in environment and (names[1] in environment or names[0] == "PMIX_RANK")
        ]
        if not found:
            return cls(rank=0, world_size=1, local_rank=0, local_size=1)
        whole = (names for names in found if names[2] in environment)
        return cls._read(environment, next(whole, found[0]))

    @classmethod
    def _read(cls, environment: Mapping[str, str], names: tuple[str, ...]) -> "Ranks":
        found = [_number(environment, name) for name in names]
        rank, world_size, local_rank, local_size = found
        if world_size is None or (world_size > 1 and local_rank is None):
            return cls._ask_mpi()
        if rank is None or not 0 <= rank < world_size:
            raise UserError(
                f"{names[0]}={rank}, {names[1]}={world_size}: no such rank; "
                "unset both or start through torchrun, mpiexec or srun"
            )
        local_size = local_size or _number(environment, "LOCAL_SIZE")
        return cls(rank, world_size, local_rank or 0, local_size or 1)

    @classmethod
    def _ask_mpi(cls) -> "Ranks":
        mpi = _mpi()
        world = mpi.COMM_WORLD
        local = world.Split_type(mpi.COMM_TYPE_SHARED)
        return cls(world.rank, world.size, local.rank, local.size)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if value is None:
        return None
    # Slurm writes "4(x2),3" for two hosts of four tasks and one of three.
    digits = re.fullmatch(r"(\d+)(\(x\d+\))?(,.*)?", value.strip())
    if not digits:
        raise UserError(f"{name}={value}: not a number; unset it or start through a launcher")
    return int(digits[1])


def choose_device(ranks: Ranks) -> "torch.device":
    """Device of this rank: a CUDA or XPU accelerator if there is one, else the CPU."""
    import torch

    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            # Some launchers show each rank only its own device.
            device = torch.device(kind, ranks.local_rank % backend.device_count())
            backend.set_device(device)
            return device
    return torch.device("cpu")


@contextmanager
def process_group(ranks: Ranks, store: "Store | None" = None) -> Iterator["torch.device"]:
    """Join torch's process group and yield this rank's device; leave the group on exit.

    Inside another `process_group`, that one serves.

    gloo on CPU, nccl on CUDA, xccl on XPU. Peers meet at MASTER_ADDR and MASTER_PORT where they
    are set, else at a place that Slurm's variables or an MPI broadcast tell. A lone process needs
    none, nor do peers that have met in a store (`meeting`).

    Raises:
        UserError: MPI does not see the peers that the launcher started, the port is taken, or two
            ranks have the same device.
    """
    import torch.distributed as dist

    device = choose_device(ranks)
    if dist.is_initialized():
        yield device
        return
    backend = BACKENDS[device.type]
    # DeepSpeed reads the device number from here.
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
        elif device.type == "cuda":
            _compare_devices(device)
        yield device
        dist.barrier(device_ids=None if device.type == "cpu" else [device.index])
    except UserError as error:
        error.among_ranks = True
        raise
    finally:
        dist.destroy_process_group()


def meeting(ranks: Ranks, seconds: float) -> "Store":
    """Open a store of keys and values that all peers share, at the place where they meet.

    It is rank 0's; others wait for it, it does not wait for them.

    Args:
        ranks: this process among its peers.
        seconds: how long to wait for rank 0, and for any key.

    Raises:
        UserError: rank 0 does not come.
    """
    import torch.distributed as dist

    if ranks.world_size == 1:
        return dist.HashStore()
    _rendezvous(ranks)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun has a store of its own there.
    first = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(
            host, port, is_master=first, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0].rstrip(". ")
        raise UserError(
            f"rank {ranks.rank} on {socket.gethostname()}: rank 0 cannot be met at {host}:{port} "
            f"within {seconds:g} s: {reason}; look at that host, or set MASTER_ADDR and MASTER_PORT"
        ) from None


def _rendezvous(ranks: Ranks) -> None:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(ranks.rank), str(ranks.world_size)
    if "MASTER_ADDR" in os.environ:
        _check_port(os.environ.setdefault("MASTER_PORT", "29500"))
        return
    tasks = _number(os.environ, "SLURM_STEP_NUM_TASKS")
    if tasks == ranks.world_size and "SLURM_STEP_NODELIST" in os.environ:
        # No message can agree on a free port here, so each job and step has its own.
        job, step = (_number(os.environ, f"SLURM_{name}_ID") or 0 for name in ("JOB", "STEP"))
        host, port = (
            hosts_of(os.environ["SLURM_STEP_NODELIST"])[0],
            15000 + (job * 7 + step) % 15000,
        )
    else:
        host, port = _agree_through_mpi(ranks)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)


def _check_port(told: str) -> None:
    if not (told.isascii() and told.isdecimal() and 0 < int(told) < 65536):
        raise UserError(
            f"MASTER_PORT={told}: not a port, which is a number from 1 to 65535; set it to one "
            "that is free on the first host, or unset it"
        )


def _join(backend: str, ranks: Ranks) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group(
            backend, init_method="env://", rank=ranks.rank, world_size=ranks.world_size
        )
    except dist.DistNetworkError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).split("\n")[0]
        raise UserError(
            f"ranks cannot meet at {place}: {reason}; set MASTER_ADDR to the first host and "
            "MASTER_PORT to a port that is free there"
        ) from None


def _agree_through_mpi(ranks: Ranks) -> tuple[str, int]:
    world = _mpi().COMM_WORLD
    if world.size != ranks.world_size:
        raise UserError(
            f"MPI sees {world.size} processes, the launcher started {ranks.world_size}; "
            "set MASTER_ADDR and MASTER_PORT, or install the mpi4py of this launcher's MPI"
        )
    place: tuple[str, int] = world.bcast(
        (socket.gethostname(), _free_port()) if ranks.rank == 0 else None
    )
    return place


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"mpi4py: {reason}; load the MPI of this launcher, or set MASTER_ADDR and MASTER_PORT"
        ) from None
    return MPI


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def num_threads(sharers: int, environment: Mapping[str, str] = os.environ) -> int | None:
    """Threads for each of the ranks that share the same cores; None: the user has chosen.

    torchrun itself sets OMP_NUM_THREADS=1, so that value is no choice under torchrun.
    """
    chosen = environment.get("OMP_NUM_THREADS")
    if chosen and not (chosen == "1" and "TORCHELASTIC_RUN_ID" in environment):
        return None
    return max(1, len(os.sched_getaffinity(0)) // sharers)


def keep_memory() -> None:
    """Let glibc keep memory that is freed, for the next step needs it again.

    It would else give large tensors back to the kernel, which has to clear their pages each time:
    on a CPU that takes up to a tenth of a training step. Other C libraries are left as they are.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD of malloc.h.
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):
            library.mallopt(option, value)


def _share_cores() -> None:
    """Set this rank's threads; launchers may bind each rank to cores of its own, or all to all."""
    import torch
    import torch.distributed as dist

    own = (socket.gethostname(), os.sched_getaffinity(0))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    threads = num_threads(everyone.count(own))
    if threads:
        torch.set_num_threads(threads)


def _compare_devices(device: "torch.device") -> None:
    import torch
    import torch.distributed as dist

    # Ranks of one device could not even tell each other through it.
    group = dist.new_group(backend="gloo")
    # Launchers may show each rank one device, which all call 0; tiles of an XPU have no such name.
    own = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own, group=group)
    check_devices(everyone)


def check_devices(owners: Sequence[tuple[str, str]]) -> None:
    """See that each rank has a device of its own.

    Args:
        owners: host and device of each rank.

    Raises:
        UserError: two have the same.
    """
    first: dict[tuple[str, str], int] = {}
    for rank, owner in enumerate(owners):
        if (other := first.setdefault(owner, rank)) != rank:
            raise UserError(
                f"ranks {other} and {rank} have the same device of {owner[0]}: start no more ranks "
                "a host than it has devices, or hide these (CUDA_VISIBLE_DEVICES=) to train on CPUs"
            )


@contextmanager
def same_fate() -> Iterator[None]:
    """Raise what one rank of the process group meets on all of them, else they would wait for it.

    Raises:
        UserError: a rank met one, or an `OSError`: a disk that is full, a file that is gone.
    """
    import torch.distributed as dist

    own: str | None = None
    try:
        yield
    except UserError as error:
        own = str(error)
    except OSError as error:
        own = f"{of_system(error)}; mend it and run again"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    for found in errors:
        if found is not None:
            raise UserError(found)


def heard(items: Iterable[Item], ranks: Ranks) -> Iterator[Item]:
    """Items, and any rank reports a `UserError` that comes in place of one; rank 0 does so anyway.

    The other ranks may not meet it; launchers end them, who wait for this one.
    """
    try:
        yield from items
    except UserError as error:
        if ranks.rank:
            print(f"tokamake: rank {ranks.rank}: {error}", file=sys.stderr, flush=True)
        raise


@contextmanager
def one_voice(ranks: Ranks) -> Iterator[None]:
    """Let rank 0 alone report a `UserError` that all ranks raise; the others exit with code 2."""
    try:
        yield
    except UserError:
        if ranks.rank:
            # torchrun ends all ranks as soon as one has failed, and rank 0 is still to speak.
            time.sleep(2)
            raise SystemExit(2) from None
        raise


def leave(ranks: Ranks, code: int) -> None:
    """End a rank of several at once, with an exit code; does nothing in a lone process with code 0.

    Python's own way out would now and then abort: gloo's threads ask for the interpreter while it
    shuts down.
    """
    if ranks.world_size == 1:
        if code:
            raise SystemExit(code)
        return
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End this process without Python's own way out, on which see `leave`."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ahead(items: Iterator[Item], *, depth: int = 1) -> Iterator[Item]:
    """The same items, made in a thread, at most `depth` of them before the caller asks for them."""
    done = object()
    with ThreadPoolExecutor(1) as pool:
        coming = deque(pool.submit(next, items, done) for _ in range(depth))
        while (item := coming.popleft().result()) is not done:
            coming.append(pool.submit(next, items, done))
            yield cast("Item", item)


def counted(number: int, noun: str) -> str:
    """A number with what it counts, for people: 1 file, 2,000 files."""
    return f"{number:,} {noun}{'s'[: number != 1]}"


def progress(
    items: Iterable[Item],
    *,
    label: str,
    total: int | None = None,
    unit: str = "items",
    size: Callable[[Item], int] = lambda _: 1,
) -> Iterator[Item]:
    """Pass items through and show how far they are: a bar on a terminal, in a log a line each 30 s.

    Args:
        items: what to go through.
        label: what is being done.
        total: number of items; taken from `items` where it knows.
        unit: what is counted.
        size: how many of it an item is.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc=label, total=total, unit=f" {unit}", leave=False) as bar:
            for item in items:
                yield item
                bar.update(size(item))
        return
    last, number = time.monotonic(), 0
    for item in items:
        yield item
        number += size(item)
        if time.monotonic() - last >= 30:
            last = time.monotonic()
            share = f"/{total:,} ({number / total:.0%})" if total else ""
            print(f"{label}: {number:,}{share} {unit}", file=sys.stderr, flush=True)


def file_workers() -> int:
    """Threads that read and write files at once where nobody says how many: disks have enough."""
    return min(4, len(os.sched_getaffinity(0)))
