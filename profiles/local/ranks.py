"""torchrun, with the options of torchrun, that ends with the exit status of the rank that failed.

torchrun itself wraps a failure in a traceback and a report of its own and always returns 1, so that
one could tell neither a user's mistake (2) nor a run that saved and stopped (75) from a crash. It
passes SIGTERM on; ranks have ten minutes then to save, not half of one.
"""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def end_ranks(number: int) -> None:
    """Pass a signal on to ranks that torchrun was just starting, and forgot, and wait for them."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if not children.exists():
        return
    # Ranks have sessions of their own, unlike other helpers of Python's.
    ranks = [pid for pid in map(int, children.read_text().split()) if os.getsid(pid) == pid]
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    for pid in ranks:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
try:
    run(parse_args(sys.argv[1:]))
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        print(f"rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
except SignalException as error:
    end_ranks(error.sigval)
    sys.exit(128 + error.sigval)
