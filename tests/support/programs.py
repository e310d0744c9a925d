"""An environment like this one, whose programs are forks of servers, see `fork_server`.

Jobs of Snakemake run `tokamake` of the environment of Snakemake's Python.
"""

import fcntl
import json
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.support.fork_server import address, shared_folder, write_client

HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "opencl:cpu"}
"""Environment in which torch finds no accelerator, neither CUDA nor XPU."""
SERVERS = {
    "core-python": "core",
    "snakemake": "snakemake",
    "job-snakemake": "snakemake",
    "tokamake": "tokamake",
    "torch-python": "tokamake",
    "worker-python": "worker",
}
"""Programs that are forks, and their servers."""
JOB_PYTHON = "TOKAMAKE_TEST_PYTHON"
"""Variable with the Python that a Snakemake of the server takes for its own."""
_JOB_PYTHON = """\
#!/bin/sh
[ "$1 $2" = "-m snakemake" ] || exec "$(dirname "$0")/python" "$@"
shift 2
{variable}=$0 exec {client} "$@"
"""


@cache
def programs(*servers: str) -> Path:
    """Folder of programs, when servers run: `snakemake`, `tokamake`.

    `python` is Python itself; `torch-python` is one that has imported torch and tokamake.
    """
    for server in servers:
        address(f"{server}_server")
    return _made(environment(shared_folder())) / "bin"


def torch_python() -> str:
    """Path of a Python that has imported torch and tokamake."""
    return str(programs("tokamake") / "torch-python")


def core_python() -> str:
    """Path of a Python that has imported megatron.core, too."""
    server = torch_python()
    address("core_server", python=server)
    return str(Path(server).with_name("core-python"))


def worker_python(asked: Sequence[str]) -> str:
    """Path of a Python that has collected the tests of files or folders."""
    server = torch_python()
    (shared_folder() / "collected.json").write_text(json.dumps([*asked]))
    address("worker_server", python=server)
    return str(Path(server).with_name("worker-python"))


def torchrun(ranks: int) -> list[str]:
    """Command prefix that starts a program on several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [torch_python(), *launcher, "--no-python"]


def environment(shared: Path) -> Path:
    """The environment in the folder that all processes of a run of pytest share."""
    return shared / "environment"


def write_job_python(folder: Path) -> Path:
    """Write a Python with which a server runs `-m snakemake`, beside one that runs the rest.

    Snakemake starts its jobs with its own Python. A signal to such a job reaches its children.
    """
    path = folder / "job-python"
    client = environment(shared_folder()) / "bin/job-snakemake"
    path.write_text(_JOB_PYTHON.format(variable=JOB_PYTHON, client=client))
    path.chmod(0o755)
    return path


@cache
def _made(folder: Path) -> Path:
    own = Path(sys.prefix)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            (folder / "bin").mkdir(parents=True)
            (folder / "lib").symlink_to(own / "lib")
            shutil.copy(own / "pyvenv.cfg", folder)
            (folder / "bin/python").symlink_to(sys.executable)
            for name, server in SERVERS.items():
                path = folder / "bin" / name
                write_client(path, folder.parent / f"{server}_server", program=name)
            write_job_python(folder / "bin")
    return folder
