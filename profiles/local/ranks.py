"""torchrun, with the options of torchrun, that ends with the exit status of the rank that failed.

torchrun itself wraps a failure in a traceback and a report of its own and always returns 1, so that
one could tell neither a user's mistake (2) nor a run that saved and stopped (75) from a crash. It
passes SIGTERM and Ctrl-C on; ranks have ten minutes then to save, not half of one, and 75 is what
it ends with where that is what they say. A second Ctrl-C ends them at once.
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

STOPPED = 75
"""Of a run that is saved, but not finished."""

popen, started = SubprocessHandler._popen, []
terminate, asked = api._terminate_process_handler, []


def noted(*arguments):
    """Start a rank, and remember it: of those that a signal ends, torchrun tells no exit code."""
    started.append(popen(*arguments))
    return started[-1]


SubprocessHandler._popen = noted


def end(number, frame):
    """Have torchrun end its ranks at a first signal; kill them at a Ctrl-C after it."""
    if not asked:
        asked.append(time.monotonic())
        terminate(number, frame)
    elif number == signal.SIGINT and time.monotonic() - asked[0] >= 1:  # not the same one twice
        for rank in started:
            rank.kill()
        send(signal.SIGKILL)
        os._exit(128 + number)


api._terminate_process_handler = end


def send(number: int) -> list[int]:
    """Send a signal to all ranks, and to those that torchrun was just starting, and forgot.

    Returns:
        Processes that it was sent to.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    pids = map(int, children.read_text().split()) if children.exists() else ()
    # Ranks have sessions of their own, unlike other helpers of Python's.
    ranks = [pid for pid in pids if os.getsid(pid) == pid]
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return ranks


def end_ranks(number: int) -> set[int]:
    """Pass a signal on to all ranks, and await their ends.

    Returns:
        Their exit codes.
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
logging.disable(logging.CRITICAL)  # of this process; ranks are others
try:
    run(parse_args(sys.argv[1:]))
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        print(f"rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
except SignalException as error:
    codes = end_ranks(error.sigval)
    sys.exit(STOPPED if STOPPED in codes <= {0, STOPPED} else 128 + error.sigval)
