"""Snakemake as a child process, which a signal to end stops together with its jobs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SAME_SECONDS = 1.0
"""Signals within this time are one request: `timeout` sends one to a process and to its group."""


class SnakemakeProcess:
    """Snakemake and its jobs, in a session of their own.

    The terminal, a batch system and `kill` reach only the process that makes this object. It sends
    SIGINT to all processes of the session: after SIGTERM, Snakemake would wait for its jobs.

    Args:
        on_stop: is called at the first signal.
        pass_fds: descriptors that Snakemake inherits.
        variables: added to the environment of this process.

    Attributes:
        stopped_by: the first signal; None: there was none.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        on_stop: Callable[[], None],
        stdout: int | None = None,
        pass_fds: Sequence[int] = (),
        variables: Mapping[str, str] = {},
    ) -> None:
        self.stopped_by: int | None = None
        self._on_stop = on_stop
        self._passed_on = float("-inf")
        self._process: subprocess.Popen[bytes] | None = None
        for number in _SIGNALS:
            # `nohup` ignores SIGHUP. Shells let background processes ignore SIGINT, and Snakemake
            # would inherit that: a handler is reset when a program starts.
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._stop)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # a background process that reads a terminal is stopped
            stdout=stdout,
            stderr=stdout and subprocess.STDOUT,
            pass_fds=pass_fds,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        self.stdout = self._process.stdout
        if self.stopped_by is not None:  # it came before the process
            self._pass_on()

    def wait(self) -> int:
        """Wait until it ends; return its exit status, 128 + N after signal N."""
        assert self._process
        status = self._process.wait()
        if self.stopped_by is not None and status != 0:
            return 128 + self.stopped_by
        return 128 - status if status < 0 else status

    def _stop(self, number: int, _: Any) -> None:
        if self.stopped_by is None:
            self.stopped_by = number
            self._on_stop()
        if self._process is not None:
            self._pass_on()

    def _pass_on(self) -> None:
        assert self._process
        if time.monotonic() - self._passed_on < _SAME_SECONDS:
            return
        self._passed_on = time.monotonic()
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGINT)
