"""How a training is asked to stop: by a batch system's SIGTERM, or Ctrl-C.

`train` and its loop have functions of theirs called; the loop looks at a `StopRequest` each step.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_REPEAT_SECONDS = 1.0
"""Within these it is the same Ctrl-C: launchers pass on what the terminal has sent already."""


@contextmanager
def on_signals(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Have a function called at each of `SIGNALS` until the block ends."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class StopRequest:
    """Takes note of signals; a Ctrl-C after another one ends the process at once, with code 130.

    Args:
        tells: whether this process says so.
    """

    def __init__(self, *, tells: bool) -> None:
        self._tells = tells
        self._since = 0.0
        self.by = ""
        """Name of the signal that came first; empty: none has come."""

    def note(self, number: int, _: Any) -> None:
        """Take note of a signal, as its handler."""
        if not self.by:
            self.by, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since >= _REPEAT_SECONDS:
            if self._tells:
                # A signal may come amid a print, which would not have another one inside.
                os.write(1, b"ended by a second Ctrl-C; the same command goes on where it saved\n")
            os._exit(128 + signal.SIGINT)
