"""`tokamake train` on ranks that a server forks, which has imported all they need: 1 s, not 7 s.

They meet as torchrun's do, in a store that their parent keeps. Faults change what a rank does
before it begins, and end it as the system would.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from tests.support.faulty import dying
from tokamake.cli import main
from tokamake.runtime.rank_errors import STOPPED
from tokamake.train import resume
from tokamake.train.stop_signals import StopRequest
from tokamake.train.trainer import Trainer

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "cyclopts",
        "deepspeed",
        "tokamake.models.llama.model",
        "tokamake.optim.adamw",
        "tokamake.train.backends.deepspeed",
        "tokamake.train.backends.native",
        "tokamake.train.trainer",
        "tokamake.train.train",
    ]
)

Fault = Callable[[], None]
TIMEOUT = 600.0
"""Seconds until ranks that do not end are killed: nothing else ends what hangs."""
CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir")
"""Functions of `os` between which a folder looks the same; a killed process loses no page."""


def nothing() -> None:
    """No fault."""


class Started:
    """Ranks of a run that have begun; those left are killed on leaving the `with` block.

    Args:
        config: run.yaml.
        ranks: number of processes.
        fault: what each of them calls first; of a module's top level, or a partial of such.
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
        for process in self.processes:
            process.start()

    def _environment(self, rank: int, ranks: int) -> dict[str, str]:
        """What torchrun gives its ranks."""
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
        self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def ended(self) -> list[int | None]:
        """Wait until all have ended, or one was killed or failed; then the others are killed.

        Returns:
            Exit codes: minus the signal's number of a rank that was killed.
        """
        running = {process.sentinel: process for process in self.processes}
        while running and (ready := wait(running, TIMEOUT)):
            for sentinel in ready:
                process = running.pop(sentinel)
                process.join()
                if process.exitcode not in (0, STOPPED):
                    self._kill()
        return [process.exitcode for process in self.processes]

    @property
    def printed(self) -> str:
        """What ranks have printed."""
        return self._printed.read_text()


def train(config: Path, *, ranks: int = 1, fault: Fault = nothing, code: int = 0) -> str:
    """Train until the ranks end; at least one must end with a code. Returns what was printed."""
    with Started(config, ranks=ranks, fault=fault) as started:
        codes = started.ended()
        assert code in codes, f"exit codes {codes}\n{started.printed}"
        return started.printed


def _rank(config: Path, environment: dict[str, str], printed: Path, fault: Fault) -> None:
    with printed.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)  # the server read OMP_NUM_THREADS when it began
    sys.argv = ["tokamake", "train", "--config", str(config)]
    fault()
    main()


def killed_in_backward() -> None:
    """Kill the last rank in its first backward pass after a checkpoint has taken its place."""
    finish, backward = Trainer._finish_saving, torch.autograd.backward
    saved = False

    def finish_saving(loop: Trainer) -> None:
        nonlocal saved
        saving = loop._saving is not None
        finish(loop)
        saved = saved or saving

    def backward_or_die(*arguments: Any, **options: Any) -> None:
        if saved and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        backward(*arguments, **options)

    Trainer._finish_saving = finish_saving
    torch.autograd.backward = backward_or_die


def killed_in_commit(number: int) -> None:
    """Kill the process instead of one of `CALLS` while step 4's checkpoint takes its place."""
    commit = resume.commit

    def dying_commit(output: Path, state: resume.ResumeState) -> Path:
        if state.step != 4:
            return commit(output, state)
        calls = [number]
        real = {name: getattr(os, name) for name in CALLS}
        for name, function in real.items():
            setattr(os, name, dying(function, calls))
        try:
            return commit(output, state)
        finally:
            for name, function in real.items():
                setattr(os, name, function)

    resume.commit = dying_commit


def terminated_in_start() -> None:
    """Ask each rank to stop while the loop is being made, before the engine's first collective."""

    def begin(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(60)

    Trainer.__init__ = begin


def writes_until_sigterm(writing: Semaphore) -> None:
    """Say when a checkpoint is being written, and write on only when SIGTERM has come."""
    write_data, request_stop = FileSystemWriter.write_data, StopRequest.note
    stopped = threading.Event()

    def wait_and_write(*arguments: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        writing.release()
        assert stopped.wait(TIMEOUT)
        return write_data(*arguments)

    def stop(request: StopRequest, *arguments: Any) -> None:
        request_stop(request, *arguments)
        stopped.set()

    FileSystemWriter.write_data = wait_and_write
    StopRequest.note = stop
