"""torchrun with its options, but with the exit status of the first rank that failed.

torchrun itself prints a traceback and a report and always returns 1. So a user's mistake (2) and a
run that saved and stopped could not be distinguished from a crash. SIGTERM, SIGUSR1 and Ctrl-C are
passed on to the ranks, which have ten minutes to save instead of 30 s. The exit status is that of
the ranks if they saved and stopped. A second Ctrl-C kills the ranks.
"""

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)
from torch.distributed.run import parse_args, run

from tokamake.runtime.exit_status import Stopped

popen, started = SubprocessHandler._popen, []
terminate, signal_times = api._terminate_process_handler, []


def start_rank(*arguments):
    """Start a rank and keep its process: torchrun returns no exit codes after a signal."""
    started.append(popen(*arguments))
    return started[-1]


SubprocessHandler._popen = start_rank


def handle_signal(number, frame):
    """Let torchrun stop its ranks at the first signal; kill them at a later Ctrl-C."""
    if not signal_times:
        signal_times.append(time.monotonic())
        terminate(number, frame)
    # Within a second, it is the same Ctrl-C, delivered twice.
    elif number == signal.SIGINT and time.monotonic() - signal_times[0] >= 1:
        for rank in started:
            rank.kill()
        send(signal.SIGKILL)
        os._exit(128 + number)


api._terminate_process_handler = handle_signal


def send(number: int) -> list[int]:
    """Send a signal to all ranks, including those that torchrun was starting when it got a signal.

    Returns:
        Process ids of the ranks.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    pids = map(int, children.read_text().split()) if children.exists() else ()
    # Each rank has its own session; helper processes of Python do not.
    ranks = [pid for pid in pids if os.getsid(pid) == pid]
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return ranks


def end_ranks(number: int) -> set[int]:
    """Send a signal to all ranks and wait for them.

    Returns:
        The exit codes of the ranks.
    """
    known = {rank.pid for rank in started}
    ranks = send(number)
    codes = {rank.wait() for rank in started}
    for pid in ranks:
        if pid not in known:
            with suppress(ChildProcessError):
                codes.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
SIGNALS = "SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT"
logging.disable(logging.CRITICAL)  # in this process only, not in the ranks
try:
    run(parse_args(["--signals-to-handle", SIGNALS, *sys.argv[1:]]))
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        print(f"rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
except SignalException as error:
    codes = end_ranks(error.sigval)
    stops = codes - {0}
    sys.exit(stops.pop() if stops <= {*Stopped} and len(stops) == 1 else 128 + error.sigval)
