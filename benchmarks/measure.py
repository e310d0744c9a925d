"""Run a command and tell what it took: time, processor time and memory of all its processes."""

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

_SECONDS_BETWEEN_LOOKS = 0.02


class Cost(NamedTuple):
    """What a command took, from the start of its process to its end."""

    seconds: float
    """Wall-clock time."""
    cpu_seconds: float
    """User and system time of the process and of all children that it waited for."""
    peak_bytes: int
    """Largest sum of the resident sizes of all its processes, looked at every 20 ms; pages that
    forked workers share count in each of them."""
    status: int
    """Exit status."""


def run(command: list[str], *, log: Path, environment: dict[str, str]) -> Cost:
    """Run a command to its end, its output going to `log`."""
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
    # Popen must not wait for a process that wait4 has taken.
    process.returncode = os.waitstatus_to_exitcode(status)
    largest = max(peak.bytes, usage.ru_maxrss * 1024)
    return Cost(seconds, usage.ru_utime + usage.ru_stime, largest, process.returncode)


class _Peak:
    """Follows the memory of a process and its descendants."""

    def __init__(self) -> None:
        self.bytes = 0
        self.over = threading.Event()

    def follow(self, pid: int) -> None:
        while not self.over.wait(_SECONDS_BETWEEN_LOOKS):
            self.bytes = max(self.bytes, sum(_resident(one) for one in _tree(pid)))


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        for listed in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                waiting += map(int, listed.read_text().split())
            except OSError:
                continue
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
