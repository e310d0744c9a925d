"""Ranks on this machine, as forks of this process, which has imported torch."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from tokamake.errors import UserError
from tokamake.runtime.ranks import Ranks

_SECONDS = 1800
"""Time after which ranks that wait for each other end."""


def on_local_ranks(work: Callable[..., list[str]], world_size: int) -> list[str]:
    """Call a function on ranks that communicate through gloo; return the lines of rank 0.

    Args:
        work: gets the ranks and the keyword argument `device`.

    Raises:
        UserError: raised on a rank, or a rank was killed.
        RuntimeError: a rank failed; the message has its traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        shared = {"world_size": world_size, "folder": Path(folder)}
        processes = [
            context.Process(target=_rank, args=(work, rank), kwargs=shared, daemon=True)
            for rank in range(world_size)
        ]
        try:
            with _signals_blocked():
                for process in processes:
                    process.start()
            return _collect(processes, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.join()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Let signals wait, which a fork would swallow. Ranks keep them blocked.

    Ctrl-C reaches ranks, too, and would be an error of theirs. This process ends them instead.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collect(processes: list[Any], folder: Path) -> list[str]:
    """Wait for all ranks, or for the first one that fails."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait([*running]):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                _raise_first(folder, processes)
    return (folder / "result").read_text(encoding="utf-8").splitlines()


def _raise_first(folder: Path, processes: list[Any]) -> None:
    """Raise the error that ended the ranks. If one was killed, others fail only because of it."""
    for rank, process in enumerate(processes):
        if (process.exitcode or 0) < 0:
            name = signal.Signals(-process.exitcode).name
            raise UserError(
                f"rank {rank} of {len(processes)} was killed by {name}; if this host has no memory "
                "left, start fewer ranks with --most-ranks"
            )
    if refused := sorted(folder.glob("*.refused")):
        raise UserError(refused[0].read_text(encoding="utf-8"))
    errors = sorted(folder.glob("*.error"))
    raise RuntimeError(errors[0].read_text(encoding="utf-8") if errors else "a rank has ended")


def _end_with_parent() -> None:
    """End this rank when the process that has forked it ends, even if it was killed."""
    parent = multiprocessing.parent_process()
    assert parent, "a fork has one"

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _rank(work: Callable[..., list[str]], rank: int, *, world_size: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed reads it
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # few of many ranks talk to each other
    code = 1
    _end_with_parent()
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "rendezvous"), world_size)
        limit = timedelta(seconds=_SECONDS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        lines = work(Ranks(rank, world_size, rank, world_size), device=torch.device("cpu"))
        if rank == 0:
            (folder / "result").write_text("\n".join(lines), encoding="utf-8")
        dist.barrier()
        code = 0
    except UserError as error:
        draft = folder / f"{rank}.draft"
        draft.write_text(str(error), encoding="utf-8")
        draft.rename(folder / f"{rank}.refused")
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        sys.stdout.flush()
        os._exit(code)  # gloo's threads would abort at Python's own exit
