"""`python faulty.py NUMBER STAGE ...`: a stage that is killed while it writes files.

The process is killed as by `kill -9` at its call number NUMBER of fsync, rename or unlink. A NUMBER
with a dot is a time in seconds, after which the process ends at any point.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tokamake.cli import main


def dying(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """Wrap a function: when `calls[0]` reaches 0, kill the process instead of calling it."""

    def call(*arguments: Any, **options: Any) -> Any:
        calls[0] -= 1
        if not calls[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return call


if __name__ == "__main__":
    when = sys.argv.pop(1)
    if "." in when:
        signal.setitimer(signal.ITIMER_REAL, float(when))  # SIGALRM ends the process by default
    else:
        calls = [int(when)]
        for name in ("fsync", "replace", "unlink"):
            setattr(os, name, dying(getattr(os, name), calls))
    main()
