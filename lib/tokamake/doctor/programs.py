"""Run other programs with a time limit: schedulers, launchers, another Python."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramOutput:
    """Output of a program, or the reason why there is none."""

    output: str = ""
    fault: str = ""
    """Reason of the failure in one line; empty if the program succeeded."""


def ask(command: Sequence[str], *, seconds: float) -> ProgramOutput:
    """Run a program once. After `seconds`, kill it and all its child processes."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace",
            start_new_session=True,  # A process group of its own, which killpg can end.
        )  # fmt: skip
    except OSError as error:
        return ProgramOutput(fault=f"{command[0]}: {error.strerror}")
    with process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return ProgramOutput(fault=f"no answer within {seconds:g} s")
    if process.returncode:
        lines = [line.strip() for line in (errors or output).splitlines() if line.strip()]
        last = lines[-1] if lines else "no message"
        return ProgramOutput(output, f"{last} (exit status {process.returncode})")
    return ProgramOutput(output)


def ask_python(script: str, *, seconds: float) -> ProgramOutput:
    """Run a script in a new process of this Python, where a crash or hang does no harm."""
    return ask([sys.executable, "-c", script], seconds=seconds)
