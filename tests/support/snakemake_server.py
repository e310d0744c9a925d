"""Snakemake as `python -m snakemake`, in forks of a server: without the second of its imports.

assert start(["--version"], folder).returncode == 0
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.support import tokamake_server
from tests.support.paths import ROOT

TIMEOUT_SECONDS = 900


def start(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    forks_jobs: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run Snakemake in a folder until it ends.

    Args:
        arguments: its command line.
        folder: current folder of the process.
        environment: all variables of the process; by default those of this process.
        forks_jobs: whether jobs with torch are forks of a server, see `tokamake_server`.

    Returns:
        Exit status, or minus the number of the signal that ended it, and the output.
    """
    with tempfile.TemporaryDirectory(prefix="snakemake-") as temporary:
        outputs = [Path(temporary, name) for name in ("stdout", "stderr")]
        variables = dict(os.environ if environment is None else environment)
        executable = sys.executable
        if forks_jobs:
            variables[tokamake_server.VARIABLE] = tokamake_server.address()
            executable = str(tokamake_server.programs())
        files = [*map(str, outputs)]
        request = [*map(str, arguments)], str(folder), variables, files, executable
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(
            arguments, code, *(path.read_text(encoding="utf-8") for path in outputs)
        )


@cache
def _server() -> subprocess.Popen[str]:
    """The server of this process; it ends when its input does."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.snakemake_server"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _serve() -> None:
    """Start a fork for each request and answer with its exit status."""
    import snakemake.cli
    import snakemake.report

    import tokamake.workflow.startup  # noqa: F401

    gc.freeze()
    while line := sys.stdin.readline():
        if not (pid := os.fork()):
            _become(*json.loads(line))
            snakemake.cli.main()
            sys.exit()
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(
    arguments: list[str],
    folder: str,
    variables: dict[str, str],
    outputs: list[str],
    executable: str,
) -> None:
    """Take what a request has."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.path[0] = folder
    sys.argv, sys.executable = ["snakemake", *arguments], executable
    signal.alarm(TIMEOUT_SECONDS)


if __name__ == "__main__":
    _serve()
