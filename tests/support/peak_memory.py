"""Largest memory of a command of `tokamake`, in a process of its own."""

import subprocess
import sys

_TELLING = """
import sys
from tokamake.cli import main
try:
    main()
finally:
    with open("/proc/self/status") as lines:
        print(next(line for line in lines if line.startswith("VmHWM")), file=sys.stderr)
"""


def peak_of(*arguments: str) -> int:
    """Largest resident set of a command, in bytes; pages of mapped files are a part of it."""
    done = subprocess.run(
        [sys.executable, "-c", _TELLING, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stderr.split("VmHWM:")[1].split()[0]) * 1024
