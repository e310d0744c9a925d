"""Run a command and measure wall-clock time, CPU time and memory of all its processes."""

import os
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SECONDS_BETWEEN_SAMPLES = 0.02


class Cost(NamedTuple):
    """The cost of a command, from the start of its process to its end."""

    seconds: float
    """Wall-clock time."""
    cpu_seconds: float
    """User and system time of the process and of all children that it waited for."""
    peak_bytes: int
    """Largest sum of the resident sizes of all its processes, sampled every 20 ms; pages that
    forked workers share count in each of them."""
    status: int
    """Exit status."""


def run(command: list[str], *, log: Path, environment: dict[str, str]) -> Cost:
    """Run a command to its end, with its output in `log`."""
    peak = _Peak()
    with log.open("wb") as stream:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env={**os.environ, **environment}
        )
        watch = threading.Thread(target=peak.follow, args=(process.pid,))
        watch.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    peak.over.set()
    watch.join()
    # wait4 has reaped the process, so Popen must not wait for it.
    process.returncode = os.waitstatus_to_exitcode(status)
    largest = max(peak.bytes, usage.ru_maxrss * 1024)
    return Cost(seconds, usage.ru_utime + usage.ru_stime, largest, process.returncode)


class _Peak:
    """Peak memory of a process and its descendants, sampled in a thread."""

    def __init__(self) -> None:
        self.bytes = 0
        self.over = threading.Event()

    def follow(self, pid: int) -> None:
        while not self.over.wait(_SECONDS_BETWEEN_SAMPLES):
            self.bytes = max(self.bytes, sum(map(_resident, _tree(pid))))


def _tree(pid: int) -> list[int]:
    """Process ids of a process and its descendants."""
    pids, pending = [], [pid]
    while pending:
        pids.append(pending.pop())
        with suppress(OSError):  # the process may end at any time
            for task in Path(f"/proc/{pids[-1]}/task").iterdir():
                with suppress(OSError):
                    pending += map(int, (task / "children").read_text().split())
    return pids


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
