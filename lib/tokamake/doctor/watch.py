"""Ends a process that waits for others for too long, whatever it waits in.

A second process looks after the first: MPI and network libraries can wait where no thread of Python
runs. It is forked, so begin before torch or MPI are imported.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Watch:
    """What the process does now, and for how long it may.

    Args:
        pipe: to the process that watches.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def begin(self, told: str) -> None:
        """Begin something that has its time from now.

        Args:
            told: what to say if it takes longer, in one line; empty: nothing.
        """
        os.write(self._pipe, f"{told}\n".encode())


@contextmanager
def watched(seconds: float, told: str) -> Iterator[Watch]:
    """Have this process killed, with a line on stderr, where a step takes longer.

    Args:
        seconds: for each step.
        told: what to say of the first one.
    """
    read, write = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(write)
        _look_after(read, parent, seconds, told)
    os.close(read)
    try:
        yield Watch(write)
    finally:
        os.close(write)
        os.waitpid(child, 0)


def _look_after(pipe: int, parent: int, seconds: float, told: str) -> None:
    """Life of the process that watches; it ends with the pipe."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a group; the pipe ends all the same
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([pipe], [], [], seconds)
        if not ready:
            if told:
                os.write(2, f"{told}\n".encode())
            with suppress(ProcessLookupError):
                os.kill(parent, signal.SIGKILL)
            os._exit(1)
        news = os.read(pipe, 65536)
        if not news:
            os._exit(0)
        told = news.decode().splitlines()[-1]
