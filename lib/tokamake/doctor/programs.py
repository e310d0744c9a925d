"""Asks other programs something, with a time limit: schedulers, compilers, other Pythons."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What a program said."""

    output: str = ""
    """Its standard output."""
    fault: str = ""
    """Why there is no answer, in one line; empty where there is one."""


def ask(command: Sequence[str], *, seconds: float) -> Answer:
    """Run a program once; it and what it started are ended where they take longer than that."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Answer(fault=f"{command[0]}: {error.strerror}")
    with process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return Answer(fault=f"no answer within {seconds:g} s")
    if process.returncode:
        said = [line.strip() for line in (errors or output).splitlines() if line.strip()]
        last = said[-1] if said else "no message"
        return Answer(output, f"{last} (exit status {process.returncode})")
    return Answer(output)


def ask_python(script: str, *, seconds: float) -> Answer:
    """Run a script in another process of this Python, so that it may crash or hang."""
    return ask([sys.executable, "-c", script], seconds=seconds)
