"""Starts the ranks of a job on this machine: `ranks.py NUMBER COMMAND...`

Ranks get the variables that torchrun sets. Unlike torchrun, this program does not import torch, so
ranks start seconds earlier, and it exits with the status of the first rank that failed: a user's
mistake (2) and a run that saved and stopped differ from a crash. When a rank fails, all ranks are
asked to stop, and killed after 30 s. SIGTERM, SIGUSR1 and Ctrl-C are passed on to the ranks, which
have ten minutes to save; a second Ctrl-C kills them.
"""

import os
import signal
import socket
import subprocess
import sys
import time

from tokamake.runtime.exit_status import Stopped

SECONDS_TO_SAVE = 600
SECONDS_AFTER_A_FAILURE = 30
PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT}


def start(rank: int, number: int, port: int, command: list[str]) -> subprocess.Popen:
    """Start a rank in a session of its own: the terminal sends Ctrl-C to this program alone."""
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    return subprocess.Popen(
        command,
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
    )


def free_port() -> int:
    """A port at which ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LocalRanks:
    """The ranks of the job.

    Args:
        number: how many.
        command: of each.
    """

    def __init__(self, number: int, command: list[str]) -> None:
        port = free_port()
        self.processes = [start(rank, number, port, command) for rank in range(number)]
        self.failed: int | None = None  # the first rank that did
        self.asked: signal.Signals | None = None  # the signal that was passed on
        self.asked_at = self.deadline = float("inf")

    def wait(self) -> int:
        """Wait until all ranks have ended; return the exit status of the job."""
        while any(process.poll() is None for process in self.processes):
            self.note_failure()
            seconds = max(self.deadline - time.monotonic(), 0)
            # At most a day: the system cannot wait for an infinite time.
            received = signal.sigtimedwait({signal.SIGCHLD, *PASSED_ON}, min(seconds, 86_400))
            if received and received.si_signo != signal.SIGCHLD:
                self.pass_on(signal.Signals(received.si_signo))
            if time.monotonic() >= self.deadline:
                self.send(signal.SIGKILL)
                self.deadline = float("inf")
        self.note_failure()
        return self.status()

    def note_failure(self) -> None:
        """Note the first rank that failed, and end all ranks."""
        codes = [process.poll() for process in self.processes]
        if self.failed is None and any(codes):
            self.failed = next(rank for rank, code in enumerate(codes) if code)
            if self.asked is None and codes[self.failed] not in {*Stopped}:
                self.send(signal.SIGTERM)
                self.deadline = time.monotonic() + SECONDS_AFTER_A_FAILURE

    def pass_on(self, number: signal.Signals) -> None:
        """Pass a first signal on to the ranks; kill them at a second Ctrl-C."""
        now = time.monotonic()
        if self.asked is None:
            self.asked, self.asked_at = number, now
            self.deadline = now + SECONDS_TO_SAVE
            self.send(number)
        # Within a second, it is the same Ctrl-C, delivered twice.
        elif number == signal.SIGINT and now - self.asked_at >= 1:
            self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks that have not ended."""
        for process in self.processes:
            process.send_signal(number)

    def status(self) -> int:
        """Exit status of the job; the ranks have ended."""
        codes = {process.returncode for process in self.processes} - {0}
        if self.asked is not None:
            has_saved = len(codes) == 1 and codes <= {*Stopped}
            return codes.pop() if has_saved else 128 + self.asked
        if self.failed is None:
            return 0
        code = self.processes[self.failed].returncode
        if code < 0:
            print(f"rank {self.failed} was ended by signal {-code}", file=sys.stderr)
        return code if code > 0 else 128 - code


if __name__ == "__main__":
    # Blocked signals wait until they are asked for, so that none comes amid the start.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *PASSED_ON})
    try:
        ranks = LocalRanks(int(sys.argv[1]), sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}; is its environment active?")
    sys.exit(ranks.wait())
