"""Runs a test's function on several gloo ranks: processes of this machine, one thread each.

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
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

_PRELOADED = ["tokamake.train.backends.native", "tokamake.train.backends.deepspeed", "deepspeed"]
"""Modules that ranks find imported: to import them takes each of them seconds of a core."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_GRACE = 3.0
"""Seconds that peers of a failed rank have to say what they met."""


class RanksFailed(Exception):
    """Some rank failed; the message holds what each of them met, the first one first."""


def spawn(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600) -> list:
    """Call a function on each rank of a new default process group.

    A failure of any rank ends them all. The first launch of a test session imports what ranks need,
    which takes seconds; later ones are forks of it.

    Args:
        function: of a module's top level, so that it can be pickled; `dist.get_rank()` tells it
            which rank it is.
        world_size: ranks.
        args: what each rank calls it with.
        timeout: seconds from launch until all have returned.

    Returns:
        What it returned on each rank, in order of ranks; tensors are copies on the CPU.

    Raises:
        RanksFailed: a rank raised, died or did not return in time.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        _run(Path(folder), function, world_size, args, timeout)
        return [_result(Path(folder, f"{rank}.result")) for rank in range(world_size)]


def _run(folder: Path, function: Callable, world_size: int, args: tuple, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    environment = {**os.environ, **_ONE_THREAD}
    processes = [
        context.Process(
            target=_rank,
            args=(rank, world_size, folder, timeout, environment, function, args),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    try:
        # Read when torch is first imported.
        with patch.dict(os.environ, _ONE_THREAD):
            for process in processes:
                process.start()
        _wait(processes, deadline)
        failures = _failures(folder, processes)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if failures:
        name = getattr(function, "__name__", function)
        raise RanksFailed("\n".join([f"{name} on {world_size} ranks:", *failures]))


def _wait(processes: list[BaseProcess], deadline: float) -> None:
    running = {process.sentinel: process for process in processes}
    while running and (ended := wait(running, max(0.0, deadline - time.monotonic()))):
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                # Peers may wait for the dead one for ever.
                deadline = min(deadline, time.monotonic() + _GRACE)


def _failures(folder: Path, processes: list[BaseProcess]) -> list[str]:
    """What went wrong, of each rank, in order of time; empty where nothing did."""
    found, silent = [], []
    for rank, process in enumerate(processes):
        error = folder / f"{rank}.error"
        if error.exists():
            text = error.read_text(encoding="utf-8")
            found.append((error.stat().st_mtime_ns, f"rank {rank} raised:\n{text}"))
        elif process.exitcode is None:
            silent.append(f"rank {rank} did not return in time and was killed")
        elif process.exitcode:
            found.append((0, f"rank {rank} died with exit code {process.exitcode}"))
    return [text for _, text in sorted(found)] + silent


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
    """A process's life. It never leaves through Python's own exit, where gloo's threads abort."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    gc.freeze()  # what was imported stays: to look through it takes long
    code = 1
    os.environ.clear()  # that of the process which all ranks are forks of
    os.environ.update(environment)
    # It warns where an in-place operation after a module could lose gradients.
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
