"""Run a test's function on several gloo ranks: processes of this machine, one thread each.

def sums(number: int) -> float:
    total = torch.tensor(float(number + dist.get_rank()))
    dist.all_reduce(total)
    return total.item()

assert spawn(sums, 2, 1) == [3.0, 3.0]
"""

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.programs import torch_python

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of ranks, and of the server that they are forks of."""
CONTEXT = multiprocessing.get_context("forkserver")
_GRACE_SECONDS = 3.0
"""Time that peers of a failed rank have to report an error of their own."""


class RanksFailed(Exception):
    """A rank failed; the message holds the errors of all ranks, the first one first."""


def spawn(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600) -> list:
    """Call a function on each rank of a new default process group; return the values by rank.

    A failure of any rank ends them all. Ranks are forks of a server that has imported all they
    need; its start takes seconds. The function is defined at a module's top level. Returned tensors
    are copies on the CPU.

    Raises:
        RanksFailed: a rank raised, died or did not return within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        _run(Path(folder), function, world_size, args, timeout)
        return [_result(Path(folder, f"{rank}.result")) for rank in range(world_size)]


def start(processes: Sequence[BaseProcess]) -> None:
    """Start processes of `CONTEXT`."""
    with patch.dict(os.environ, ONE_THREAD):
        _start_server()
        for process in processes:
            process.start()


@cache
def _start_server() -> None:
    """Start the server of this process, which is a fork, too, and so has what ranks import."""
    resource_tracker.ensure_running()
    CONTEXT.set_executable(torch_python())
    forkserver.ensure_running()
    CONTEXT.set_executable(sys.executable)


def kill(processes: Sequence[BaseProcess]) -> None:
    """Kill processes that still run, and wait for their end."""
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()


def _run(folder: Path, function: Callable, world_size: int, args: tuple, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    environment = {**os.environ, **ONE_THREAD}
    processes = [
        CONTEXT.Process(
            target=_rank,
            args=(rank, world_size, folder, timeout, environment, function, args),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    try:
        start(processes)
        _wait(processes, deadline)
        failures = _failures(folder, processes)
    finally:
        kill(processes)
    if failures:
        name = getattr(function, "__name__", function)
        raise RanksFailed("\n".join([f"{name} on {world_size} ranks:", *failures]))


def _wait(processes: Sequence[BaseProcess], deadline: float) -> None:
    running = {process.sentinel: process for process in processes}
    while running and (ended := wait(running, max(0.0, deadline - time.monotonic()))):
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                # Peers may wait for the dead rank for ever.
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)


def _failures(folder: Path, processes: Sequence[BaseProcess]) -> list[str]:
    """The error of each rank that failed, in order of time."""
    failures, silent = [], []
    for rank, process in enumerate(processes):
        error = folder / f"{rank}.error"
        if error.exists():
            text = error.read_text(encoding="utf-8")
            failures.append((error.stat().st_mtime_ns, f"rank {rank} raised:\n{text}"))
        elif process.exitcode is None:
            silent.append(f"rank {rank} did not return in time and was killed")
        elif process.exitcode:
            failures.append((0, f"rank {rank} died with exit code {process.exitcode}"))
    return [text for _, text in sorted(failures)] + silent


def _result(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _rank(
    rank: int,
    world_size: int,
    folder: Path,
    timeout: float,
    environment: dict[str, str],
    function: Callable,
    args: tuple,
) -> None:
    """Body of a rank's process. Python's own exit is avoided: gloo's threads would abort there."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    gc.freeze()  # imported objects stay alive, and to search them takes long
    code = 1
    os.environ.clear()  # it is the server's
    os.environ.update(environment)
    # torch warns where an in-place operation after a module could lose gradients.
    warnings.filterwarnings("error", message="FSDP2-wrapped module")
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "rendezvous"), world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        torch.save(
            function(*args), folder / f"{rank}.result", pickle_protocol=pickle.HIGHEST_PROTOCOL
        )
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        draft = folder / f"{rank}.draft"
        draft.write_text(traceback.format_exc(), encoding="utf-8")
        draft.rename(folder / f"{rank}.error")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
