"""Watchdog: kill a process that waits for other ranks for too long.

A second process watches the first one, because MPI and network libraries can block while no Python
thread runs. It is forked, so start it before torch or MPI are imported.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Watch:
    """Steps of the watched process, each with the same time limit."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def begin(self, message: str) -> None:
        """Begin a new step; the message, unless empty, is printed if it takes too long."""
        os.write(self._pipe, f"{message}\n".encode())


@contextmanager
def watched(seconds: float, message: str) -> Iterator[Watch]:
    """Kill this process, with a line on stderr, if a step takes too long."""
    read, write = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(write)
        _watch(read, parent, seconds, message)
    os.close(read)
    try:
        yield Watch(write)
    finally:
        os.close(write)
        os.waitpid(child, 0)


def _watch(pipe: int, parent: int, seconds: float, message: str) -> None:
    """Run the watchdog process until the parent closes the pipe."""
    # Launchers signal the whole process group. The pipe ends this process anyway.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([pipe], [], [], seconds)
        if not ready:
            if message:
                os.write(2, f"{message}\n".encode())
            with suppress(ProcessLookupError):
                os.kill(parent, signal.SIGKILL)
            os._exit(1)
        data = os.read(pipe, 65536)
        if not data:
            os._exit(0)
        message = data.decode().splitlines()[-1]
