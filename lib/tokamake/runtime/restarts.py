"""Restart the ranks of a job in the same job, from the last checkpoint, when one of them dies.

`python -m tokamake.runtime.restarts NUMBER FOLDER COMMAND...` runs a command that starts all ranks,
such as a launch script, until it succeeds. When a rank dies, launchers end the other ranks. The
command then runs again, at most NUMBER times in a row without a new checkpoint in FOLDER, after a
pause that grows. The job keeps its nodes and does not go back to the queue. If it has more nodes
than its ranks need, these replace nodes that are lost (`spare_nodes`).

A user's mistake, a training that has diverged, and a stop on request end it at once. So does an
error such as a full disk: a restart would meet it again, a new job perhaps not.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tokamake.errors import EXIT_USER_ERROR, RESTART_VARIABLE
from tokamake.runtime.exit_status import HUNG, Stopped
from tokamake.runtime.spare_nodes import SpareNodes, find_spare_nodes

_FIRST_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 300.0
_FINAL = {0, EXIT_USER_ERROR, 128 + signal.SIGINT, *Stopped}
"""Exit statuses after which nothing is restarted; 130: a second Ctrl-C."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Restarter:
    """Runs a command again, up to `num_restarts` times without a new checkpoint."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        num_restarts: int,
        nodes: SpareNodes | None = None,
    ) -> None:
        self._command, self._folder = command, folder
        self._num_restarts, self._nodes = num_restarts, nodes
        self._final_error = folder.with_name(f".{folder.name}.error")
        self._asked_to_stop = threading.Event()

    def run(self) -> int:
        """Run the command until it ends for good; return its exit status."""
        used, best = 0, newest_step(self._folder)
        while True:
            begin = time.monotonic()
            status = self._run_once()
            if self._is_final(status):
                return status
            if (step := newest_step(self._folder)) > best:
                used, best = 0, step
            seconds = time.monotonic() - begin
            reason = f"ranks {describe(status)} after {seconds:.0f} s, at step {best}"
            if used == self._num_restarts:
                _say(f"{reason}; no restart is left ({used} without a new checkpoint)")
                return status
            seconds = pause(used)
            used += 1
            _say(f"{reason}; restart {used} of {self._num_restarts} in {seconds:g} s")
            if self._asked_to_stop.wait(seconds) or not self._has_nodes():
                return status

    def stop(self, *_: object) -> None:
        """Restart nothing any more; a handler of signals."""
        self._asked_to_stop.set()

    def _has_nodes(self) -> bool:
        """Whether a restart is possible: enough nodes are left, and nobody has asked to stop."""
        is_possible = self._nodes is None or self._nodes.replace_lost()
        return is_possible and not self._asked_to_stop.is_set()

    def _run_once(self) -> int:
        self._final_error.unlink(missing_ok=True)
        variables = {**os.environ, RESTART_VARIABLE: str(self._final_error.absolute())}
        variables |= self._nodes.variables if self._nodes else {}
        code = subprocess.run(self._command, env=variables, check=False).returncode
        return code if code >= 0 else 128 - code

    def _is_final(self, status: int) -> bool:
        # Launchers may return the status of a rank that they killed, instead of the first one.
        has_error = self._final_error.exists()
        self._final_error.unlink(missing_ok=True)
        return status in _FINAL or has_error or self._asked_to_stop.is_set()


def pause(used: int) -> float:
    """Seconds before a restart, after some without a new checkpoint."""
    return min(_FIRST_PAUSE_SECONDS * 4.0**used, _MAX_PAUSE_SECONDS)


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint in an output folder; 0: it has none."""
    try:
        text = (folder / "latest").read_text(errors="replace")
    except OSError:
        return 0
    step = text.strip().removeprefix("global_step")
    return int(step) if step.isdecimal() else 0


def describe(status: int) -> str:
    """An exit status in words."""
    if status == HUNG:
        return "hung"
    if status > 128:
        return f"ended by signal {status - 128}"
    return f"ended with exit status {status}"


def _say(text: str) -> None:
    print(f"tokamake: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Read the command line, run its command, exit with the command's status."""
    number, folder, *command = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="tokamake-hosts-") as own_folder:
        nodes = find_spare_nodes(command, os.environ, folder=Path(own_folder))
        restarter = Restarter(command, Path(folder), num_restarts=int(number), nodes=nodes)
        for each in _SIGNALS:
            # The ranks get them, too, and save. Here they only prevent a restart.
            signal.signal(each, restarter.stop)
        sys.exit(restarter.run())


if __name__ == "__main__":
    main()
