"""The device of a rank: its memory, and errors by which a driver reports that it is broken.

On CPUs, memory is a rank's share of the host's memory and of control groups. The next job does not
use the host of a broken device.
"""

import math
import os
import re
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import note_faulty_hosts
from tokamake.runtime.device_types import DEVICE_TYPES, device_type
from tokamake.runtime.ranks import Ranks

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OUT_OF_MEMORY = re.compile(
    r"can't (allocate memory|start new thread)|Resource temporarily unavailable|out of memory"
    r"|STATUS_ALLOC_FAILED|OUT_OF_(HOST|DEVICE)_MEMORY"
)
"""Messages of PyTorch's allocator for hosts, of threads without room for their stacks, of CUDA and
its libraries, and of Level Zero."""
_FAULTS = re.compile(
    r"uncorrectable (ECC|NVLink) error"
    r"|GPU is lost"
    r"|ERROR_DEVICE_LOST"  # Level Zero (ZE_RESULT_) and Unified Runtime (UR_RESULT_)
)
"""Messages that a broken device causes, and hardly ever a program.

Other messages, such as an illegal memory access or NCCL's "unhandled system error", may be caused
by the program, or by another host.
"""
_NOTE = "This host is noted as faulty."


def accelerators() -> Iterator[tuple[str, Any]]:
    """Each type of accelerator that torch finds on this host, with torch's module for it."""
    import torch

    for kind in DEVICE_TYPES:
        module = getattr(torch, kind, None) if kind != "cpu" else None
        if module is not None and module.is_available():
            yield kind, module


def group_device() -> "torch.device":
    """Device of the tensors that ranks exchange in the default process group."""
    import torch
    import torch.distributed as dist

    kinds = {each.backend: kind for kind, each in DEVICE_TYPES.items()}
    return torch.device(kinds.get(dist.get_backend(), "cpu"))


def copied_to(tensor: "Tensor", device: "torch.device") -> "Tensor":
    """Copy a tensor of the host to a device; an accelerator copies it while the host continues.

    That needs pinned memory. torch does not reuse pinned memory before the copy has ended.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def synchronize(device: "torch.device") -> None:
    """Wait until a device has done its work; a CPU has always."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_memory(device: "torch.device", ranks: Ranks) -> float:
    """Bytes that this rank may use of its device; the ranks of a host share its memory."""
    if (memory := device_type(device).memory_bytes) is not None:
        return float(memory(device))
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, *_cgroup_limits()) / ranks.local_size


def device_name(device: "torch.device") -> str:
    import torch

    return "cpu" if device.type == "cpu" else getattr(torch, device.type).get_device_name(device)


def peak_memory(device: "torch.device") -> float:
    """Most bytes that this process has had: of its device, or in a CPU's memory.

    The device does not wait for it.
    """
    import torch

    if device.type != "cpu":
        return float(getattr(torch, device.type).max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device of a rank, or its host, has too little memory."""
    is_stated = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    return is_stated or isinstance(error, MemoryError)


def _cgroup_limits(root: Path = Path("/")) -> list[float]:
    """Memory limits of this process's control groups; `root` has proc and sys."""
    limits = [math.inf]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return limits
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base, name = root / "sys/fs/cgroup", "memory.max"  # version 2: no controllers listed
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            base, name = base / "memory", "memory.limit_in_bytes"
        inner = base / path.lstrip("/")
        # A parent's limit also holds for its children.
        for folder in (inner, *inner.parents):
            with suppress(OSError, ValueError):  # "max": no limit
                limits.append(float((folder / name).read_text()))
            if folder == base:
                break
    return limits


def host_name() -> str:
    """Name of this host for the batch system: the network may know it by another one than Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@contextmanager
def noted_device_faults(ranks: Ranks) -> Iterator[None]:
    """Note this host as faulty if its device reports that it is broken; the error goes on.

    An error that passes several of these is noted once.
    """
    try:
        yield
    except RuntimeError as error:
        fault = _FAULTS.search(str(error))
        if fault and _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)
            host = host_name()
            note_faulty_hosts([host])
            text = f"tokamake: rank {ranks.rank} on {host}: its device is faulty: {fault[0]}"
            print(text, file=sys.stderr, flush=True)
        raise
