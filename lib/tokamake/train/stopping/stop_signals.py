"""SIGTERM and SIGUSR1 of a batch system, and Ctrl-C: how they stop a training.

`train` and the trainer install handlers. The trainer looks at its `Stopping` in each step.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_REPEAT_SECONDS = 1.0
"""A second signal within this time is the same Ctrl-C: the terminal sends it to all processes, and
launchers send it again to theirs."""


@contextmanager
def on_signals(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Install a handler of `SIGNALS` until the block ends."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class StopRequest:
    """Records the first signal; a Ctrl-C after it ends the process at once, with code 130."""

    def __init__(self, *, reports: bool) -> None:
        self._reports = reports
        self._since = 0.0
        self.by = ""
        """Name of the first signal; empty: none has come."""

    def note(self, number: int, _: Any) -> None:
        """Handle a signal."""
        if not self.by:
            self.by, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since >= _REPEAT_SECONDS:
            if self._reports:
                # Not print: the signal may interrupt one, and print cannot be nested.
                os.write(
                    1, b"ended by a second Ctrl-C; the same command continues from the last save\n"
                )
            os._exit(128 + signal.SIGINT)
