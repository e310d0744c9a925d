"""Errors by which a driver reports a broken device: the next job does not use the host."""

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tokamake.errors import note_faulty_hosts
from tokamake.runtime.ranks import Ranks

FAULTS = re.compile(
    r"uncorrectable (ECC|NVLink) error"
    r"|GPU is lost"
    r"|ERROR_DEVICE_LOST"  # Level Zero (ZE_RESULT_) and Unified Runtime (UR_RESULT_)
)
"""Messages that a broken device causes, and hardly ever a program.

Others, such as an illegal memory access or NCCL's "unhandled system error", may have their cause in
the program, or on another host.
"""
_NOTE = "This host is noted as faulty."


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
        fault = FAULTS.search(str(error))
        if fault and _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)
            host = host_name()
            note_faulty_hosts([host])
            text = f"tokamake: rank {ranks.rank} on {host}: its device is faulty: {fault[0]}"
            print(text, file=sys.stderr, flush=True)
        raise
