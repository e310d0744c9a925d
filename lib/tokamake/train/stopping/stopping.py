"""Whether a run is asked to stop before its end: by a signal, the time of its job, or a file."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tokamake.errors import note_wanted_end
from tokamake.runtime.exit_status import Stopped
from tokamake.runtime.rank_errors import first_of_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.stopping.deadline import Deadline
from tokamake.train.stopping.stop_signals import StopRequest

FILE = "stop"
"""File in the output folder of a run; who creates it stops the run."""
_LOOK_SECONDS = 5.0
"""Time between two looks for the file: it may be on a slow file system."""


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
