"""`python faulty.py NUMBER STAGE ...`: a stage killed at a call that brings files to disk.

Counted are fsync, rename and unlink; at NUMBER the process ends as by `kill -9`. A NUMBER with a
dot is a time in seconds instead, at which the system ends the process wherever it is.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tokamake.cli import main


def dying(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """Wrap a function so that the process is killed instead of its last call."""

    def call(*arguments: Any, **options: Any) -> Any:
        calls[0] -= 1
        if not calls[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return call


if __name__ == "__main__":
    when = sys.argv.pop(1)
    if "." in when:
        signal.setitimer(signal.ITIMER_REAL, float(when))  # its signal's default is to end us
    else:
        calls = [int(when)]
        for name in ("fsync", "replace", "unlink"):
            setattr(os, name, dying(getattr(os, name), calls))
    main()
