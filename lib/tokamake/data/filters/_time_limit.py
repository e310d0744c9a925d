"""Time limit of the filters of a document: a timer of the process interrupts the filter.

A search of `re` holds the interpreter lock for as long as it takes, but it looks for signals, as
Python code does. Code in C that looks for none ends by itself, or with its job. Python delivers
signals to the main thread of a process only: in other threads there is no limit.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_TICKS = 8
"""Ticks of the timer in the time limit. A document has at least this time, and a tick more at
most."""


class TimeLimitExceeded(BaseException):
    """No `Exception`: a filter that catches all errors must not catch it."""


class TimeLimit:
    """Interrupts a filter that runs longer than `seconds` on a document; 0: no limit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running = -1
        """Number of the document that a filter runs on; -1: no filter runs."""
        self._last = -1
        self._ticks = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch filters; a timer that was set before continues later.

        A timer for many documents: setting one for each would cost more than fast filters take.
        """
        if not self.seconds or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._last = -1
        handler = signal.signal(signal.SIGALRM, self._tick)
        tick = self.seconds / _TICKS
        left, interval = signal.setitimer(signal.ITIMER_REAL, tick, tick)
        started = time.monotonic()
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if left:
                left -= time.monotonic() - started
                signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval)

    def _tick(self, _number: int, _frame: FrameType | None) -> None:
        """Count the ticks that a document has seen: time in which the job is stopped has none."""
        if self.running < 0:
            return
        if self.running != self._last:
            self._last, self._ticks = self.running, 0
        elif self._ticks < _TICKS:
            self._ticks += 1
        if self._ticks == _TICKS:
            raise TimeLimitExceeded
