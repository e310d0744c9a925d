"""Stages in forks of a server, and `tokamake train` on ranks: they start in 1 s instead of 7 s.

Ranks meet as under torchrun, in a store that their parent keeps. A fault is a function that changes
a rank before it begins, for example so that the rank is killed at a certain point.
"""

import os
import pkgutil
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from tests.support.faulty import dying
from tests.support.ranks import CONTEXT, kill, start
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.cli import main
from tokamake.runtime.exit_status import Stopped
from tokamake.train.checkpoints.saving import CheckpointSaver
from tokamake.train.stopping.stopping import StopRequest
from tokamake.train.trainer import Trainer

Fault = Callable[[], None]
TIMEOUT_SECONDS = 600.0
"""Time until ranks that do not end are killed: nothing else ends a rank that hangs."""
CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
"""Functions of `os` that change which files a folder has, or that end the writing of a file."""


def nothing() -> None:
    """No fault."""


class Started:
    """Ranks of a run that have begun; those that still run are killed at the end of the `with`.

    Each rank first calls the fault, which a module defines at its top level, or a partial of such.
    """

    def __init__(self, config: Path, *, ranks: int = 1, fault: Fault = nothing) -> None:
        self._printed = config.with_name("printed.txt")
        self._printed.write_text("")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[ForkServerProcess] = [
            CONTEXT.Process(
                target=_rank, args=(config, self._environment(rank, ranks), self._printed, fault)
            )
            for rank in range(ranks)
        ]
        start(self.processes)

    def _environment(self, rank: int, ranks: int) -> dict[str, str]:
        """Variables that torchrun sets."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        kill(self.processes)

    def ended(self) -> list[int | None]:
        """Exit codes of all ranks at their end: minus the signal's number for a killed one.

        If a rank was killed or failed, the others are killed.
        """
        running = {process.sentinel: process for process in self.processes}
        while running and (ready := wait(running, TIMEOUT_SECONDS)):
            for sentinel in ready:
                process = running.pop(sentinel)
                process.join()
                if process.exitcode not in (0, *Stopped):
                    kill(self.processes)
        return [process.exitcode for process in self.processes]

    @property
    def printed(self) -> str:
        """Output of all ranks."""
        return self._printed.read_text()


def train(config: Path, *, ranks: int = 1, fault: Fault = nothing, code: int = 0) -> str:
    """Train until the ranks end, one or more of them with an exit code; return their output."""
    with Started(config, ranks=ranks, fault=fault) as started:
        codes = started.ended()
        assert code in codes, f"exit codes {codes}\n{started.printed}"
        return started.printed


def _rank(config: Path, environment: dict[str, str], printed: Path, fault: Fault) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)  # the server read OMP_NUM_THREADS when it began
    _run(["train", "--config", str(config)], printed, fault)


def _run(arguments: list[str], printed: Path, fault: Fault) -> None:
    with printed.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.argv = ["tokamake", *arguments]
    fault()
    main()


def limited(megabytes: int) -> None:
    """Let this process take so much more address space than it has now, as `ulimit -v` would."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_stage(
    arguments: list[str], log: Path, *, seconds: float = 600, fault: Fault = nothing
) -> int:
    """Run a stage; kill it with SIGKILL after a time. Return its exit code, -9 if it was killed.

    Its process first calls the fault, which a module defines at its top level.
    """
    log.write_text("")
    process: ForkServerProcess = CONTEXT.Process(target=_run, args=(arguments, log, fault))
    start([process])
    process.join(seconds)
    kill([process])
    assert process.exitcode is not None
    return process.exitcode


def timed(arguments: list[str], log: Path) -> float:
    """Run a stage to its end; return the seconds that it took."""
    begin = time.monotonic()
    assert run_stage(arguments, log) == 0, log.read_text()
    return time.monotonic() - begin


def contents(path: Path) -> dict[str, bytes]:
    """A file, or all files of a folder, by name; nothing if it is not there."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {str(each.relative_to(path)): each.read_bytes() for each in files}


def killed_in_backward() -> None:
    """Kill the last rank in its first backward pass after a checkpoint has taken its place."""
    finish, backward = CheckpointSaver.finish, torch.autograd.backward
    saved = False

    def finish_saving(saver: CheckpointSaver) -> None:
        nonlocal saved
        saving = saver._saving is not None
        finish(saver)
        saved = saved or saving

    def backward_or_die(*arguments: Any, **options: Any) -> None:
        if saved and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        backward(*arguments, **options)

    CheckpointSaver.finish = finish_saving
    torch.autograd.backward = backward_or_die


def killed_in_save(number: int, rank: int, step: int = 4) -> None:
    """Kill a rank instead of one of its `CALLS`, from 1, in the save of a step's checkpoint.

    Checkpoints of later steps are saved without a kill.
    """
    begin, finish = CheckpointSaver.begin, CheckpointSaver.finish
    calls = [number]
    originals = {name: getattr(os, name) for name in CALLS}

    def begin_dying(saver: CheckpointSaver, state: ResumeState) -> None:
        if state.step == step and dist.get_rank() == rank:
            for name, function in originals.items():
                setattr(os, name, dying(function, calls))
        begin(saver, state)

    def finish_dying(saver: CheckpointSaver) -> None:
        finish(saver)
        for name, function in originals.items():
            setattr(os, name, function)

    CheckpointSaver.begin = begin_dying
    CheckpointSaver.finish = finish_dying


def terminated_in_start() -> None:
    """Send each rank SIGTERM while it builds the trainer, before the engine's first collective."""

    def begin(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(60)

    Trainer.__init__ = begin


def writes_until_sigterm(writing: Semaphore) -> None:
    """Report that a checkpoint is being written, and write on only after a SIGTERM."""
    write_data, request_stop = FileSystemWriter.write_data, StopRequest.note
    stopped = threading.Event()

    def wait_and_write(*arguments: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        writing.release()
        assert stopped.wait(TIMEOUT_SECONDS)
        return write_data(*arguments)

    def stop(request: StopRequest, *arguments: Any) -> None:
        request_stop(request, *arguments)
        stopped.set()

    FileSystemWriter.write_data = wait_and_write
    StopRequest.note = stop


STEP = "tokamake.train.backends.native:Engine.train_step"


def stopped_in(method: str, rank: int, number: int) -> None:
    """Stop a rank by SIGSTOP before a call of a method, from 1, as a rank that hangs."""
    _before(method, rank, number, partial(os.kill, os.getpid(), signal.SIGSTOP))


def exits_in(method: str, rank: int, number: int) -> None:
    """End a rank with exit status 1 before a call, without a word; arguments of `stopped_in`."""
    _before(method, rank, number, partial(os._exit, 1))


def _before(method: str, rank: int, number: int, fault: Fault) -> None:
    path, _, name = method.rpartition(".")
    owner = pkgutil.resolve_name(path)
    function = getattr(owner, name)

    def fail_or_call(*arguments: Any, **options: Any) -> Any:
        nonlocal number
        number -= 1
        if not number and dist.get_rank() == rank:
            fault()
        return function(*arguments, **options)

    setattr(owner, name, fail_or_call)
