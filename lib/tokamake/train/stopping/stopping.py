"""Whether a run is asked to stop before its end: by a signal, the time of its job, or a file.

Signals are SIGTERM and SIGUSR1 of a batch system, and Ctrl-C. The commands and the trainer install
handlers. The trainer looks at its `Stopping` in each step.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from tokamake.errors import note_wanted_end
from tokamake.runtime.exit_status import Stopped
from tokamake.runtime.rank_errors import first_of_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.stopping.deadline import Deadline

FILE = "stop"
"""File in the output folder of a run; who creates it stops the run."""
_LOOK_SECONDS = 5.0
"""Time between two looks for the file: it may be on a slow file system."""
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


@contextmanager
def exit_on_signals(ranks: Ranks) -> Iterator[None]:
    """Exit on a signal while there is nothing to save.

    That is before the first step and after the last; in between, the trainer has its own handler.
    """

    def stop(number: int, _: Any) -> NoReturn:
        name = signal.Signals(number).name
        if ranks.rank == 0:
            # Not print: the signal may interrupt one, and print cannot be nested.
            os.write(1, f"stopped by {name}; there was nothing to save\n".encode())
        os._exit(Stopped[name])

    with on_signals(stop):
        yield


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


class Stopping:
    """Requests to stop a run, as far as this rank knows."""

    def __init__(
        self,
        output: Path,
        ranks: Ranks,
        *,
        deadline: Deadline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._ranks, self._deadline, self._clock = output / FILE, ranks, deadline, clock
        self._next_look = clock()
        self._reason = ""
        self.signals = StopRequest(reports=ranks.rank == 0)

    def is_asked(self) -> bool:
        """Whether to stop after the next step; call it once before each step."""
        is_near = self._deadline.near()
        if self.signals.by:
            self._reason = self.signals.by
        elif is_near:
            self._reason = Stopped.TIME.name
        elif self._has_file():
            self._reason = Stopped.FILE.name
        return bool(self._reason)

    def _has_file(self) -> bool:
        if self._ranks.rank or self._clock() < self._next_look:
            return False
        self._next_look = self._clock() + _LOOK_SECONDS
        return self._file.exists()

    def agree(self) -> Stopped:
        """Agree on a reason, once any rank is asked to stop and the run is saved.

        Ranks get signals at different times, and only rank 0 knows the time and looks for the file.
        All ranks call this together. It removes the file.
        """
        reason = Stopped[first_of_ranks(self._reason)]
        if reason is Stopped.FILE and self._ranks.rank == 0:
            note_wanted_end()
            with suppress(OSError):
                self._file.unlink()
        return reason


def describe(reason: Stopped) -> str:
    """A reason in words, after `stopped`."""
    if reason is Stopped.TIME:
        return "before the end of the job"
    return f"by the file {FILE}" if reason is Stopped.FILE else f"by {reason.name}"
