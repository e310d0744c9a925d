"""Snakemake as `python -m snakemake`, in forks of a server: without the second of its imports.

assert start(["--version"], folder).returncode == 0
"""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.fork_server import Server, end_after
from tests.support.programs import JOB_PYTHON, environment, programs

TIMEOUT_SECONDS = 900


def start(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Snakemake in a folder until it ends; its jobs are forks of a server, too.

    The status is minus the number of the signal that ended it. By default, it has the variables of
    this process.
    """
    return subprocess.run(
        [programs("snakemake", "tokamake") / "snakemake", *map(str, arguments)],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip


class _Timer(threading.Timer):
    """Snakemake's end does not await it: a scheduler without jobs has one that wakes it up."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.daemon = True


def _main() -> None:
    import pandas  # noqa: F401
    import smart_open  # noqa: F401
    import snakemake.cli
    import snakemake.report

    import tokamake.workflow.startup  # noqa: F401

    snakemake.cli.get_argument_parser()  # searches all folders of packages for plug-ins
    gc.freeze()
    path = Path(sys.argv[1])
    if request := Server(path, grouped=["job-snakemake"]).serve():
        own = str(environment(path.parent) / "bin/job-python")
        sys.path[0], sys.executable = str(Path.cwd()), os.environ.get(JOB_PYTHON, own)
        sys.argv = ["snakemake", *request.arguments]
        threading.Timer = _Timer
        end_after(snakemake.cli.main)


if __name__ == "__main__":
    _main()
