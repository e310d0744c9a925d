"""Stages that are killed at an instant, or have little memory: forks that have imported torch."""

import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.support.ranks import CONTEXT, kill, start
from tokamake.cli import main

Fault = Callable[[], None]


def nothing() -> None:
    """No fault."""


def limited(megabytes: int) -> None:
    """Let this process take so much more address space than it has now, as `ulimit -v` would."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_stage(
    arguments: list[str], log: Path, *, seconds: float = 600, fault: Fault = nothing
) -> int:
    """Run a stage; kill it with SIGKILL after a time.

    Args:
        arguments: of the command line, after `tokamake`.
        log: file for what it prints.
        seconds: time from its start to the kill.
        fault: called in its process before it begins; defined at a module's top level.

    Returns:
        Exit code: minus the signal's number if it was killed.
    """
    process: ForkServerProcess = CONTEXT.Process(target=_stage, args=(arguments, log, fault))
    start([process])
    process.join(seconds)
    kill([process])
    assert process.exitcode is not None
    return process.exitcode


def timed(arguments: list[str], log: Path) -> float:
    """Run a stage to its end; return the seconds that it took."""
    begin = time.monotonic()
    assert run_stage(arguments, log) == 0, log.read_text()
    return time.monotonic() - begin


def contents(path: Path) -> dict[str, bytes]:
    """A file, or all files of a folder, by name; nothing if it is not there."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {str(each.relative_to(path)): each.read_bytes() for each in files}


def _stage(arguments: list[str], log: Path, fault: Fault) -> None:
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.argv = ["tokamake", *arguments]
    fault()
    main()
