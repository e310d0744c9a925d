"""Checks of what runs are made with: Python, torch, DeepSpeed, MPI, compiler, Snakemake, limits.

What is slow, or can crash or hang, is imported by another process.
"""

import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tokamake.doctor.launcher import SECONDS, Launcher, ask_in_job
from tokamake.doctor.programs import ask_python
from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.runtime.process_group import BACKENDS

RECIPE = "see `An environment of your own` in the README of the profiles"

_OPEN_FILES = 1024
LOCKED_BYTES = 2**26

_TORCH = """
import json, sys
from tokamake.doctor.torch_facts import torch_facts
found = {"torch": torch_facts()}
try:
    import deepspeed
    found["deepspeed"] = deepspeed.__version__
except Exception as error:
    found["fault"] = f"{type(error).__name__}: {error}".splitlines()[0]
sys.stdout.write("\\n" + json.dumps(found))
"""
_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__ + ", " + MPI.Get_library_version().strip(" \\0\\n").splitlines()[0])
"""


def check_python(folder: Path = Path(sys.prefix)) -> list[Result]:
    """Version of Python, which interpreter it is, and whose environment.

    Args:
        folder: of the environment.
    """
    own = metadata.metadata("tokamake")["Requires-Python"]
    version, value = platform.python_version(), f"{platform.python_version()}, {sys.executable}"
    if version not in SpecifierSet(own):
        return [wrong("Python", value, f"tokamake needs {own}; {RECIPE}")]
    if folder.stat().st_uid not in (os.getuid(), 0):
        remedy = f"another person can change it under a run; {RECIPE}"
        return [warning("Python", f"{value}, in an environment of {_owner(folder)}", remedy)]
    return [ok("Python", value)]


def _owner(folder: Path) -> str:
    try:
        return folder.owner()
    except KeyError:
        return f"user {folder.stat().st_uid}"


def required(package: str) -> SpecifierSet:
    """Versions of a package that tokamake takes."""
    found = map(Requirement, metadata.requires("tokamake") or [])
    return next((one.specifier for one in found if one.name == package), SpecifierSet())


def check_torch() -> list[Result]:
    """Versions of torch and DeepSpeed, device, communication and bf16, for a new process."""
    answer = ask_python(_TORCH, seconds=SECONDS)
    if answer.fault:
        return [wrong("torch", answer.fault, f"install the torch of your site; {RECIPE}")]
    found = json.loads(answer.output.splitlines()[-1])
    version, fault = found.get("deepspeed", ""), found.get("fault", "")
    return [*judge_torch(found["torch"], os.environ), judge_deepspeed(version, fault)]


def judge_torch(facts: Mapping[str, Any], environment: Mapping[str, str]) -> list[Result]:
    """Results of what `torch_facts` found."""
    wanted, kind = required("torch"), facts["device"]
    backend = BACKENDS[kind]
    results = [ok("torch", facts["torch"])]
    if not wanted.contains(facts["torch"].partition("+")[0], prereleases=True):
        remedy = f"tokamake is tested with {wanted}; {RECIPE}"
        results = [warning("torch", facts["torch"], remedy)]
    count, name = facts["devices"], facts["name"]
    value = f"{kind}, {count} × {name}" if count else kind
    hidden = environment.get("CUDA_VISIBLE_DEVICES") == ""
    if facts["seen"] and not count and not hidden:
        remedy = "this torch cannot use it; install the one that your site recommends"
        results.append(warning("device", f"{value}, although {facts['seen']} is here", remedy))
    else:
        results.append(ok("device", value))
    if backend in facts["backends"]:
        others = [name for name in facts["backends"] if name != backend]
        also = f" (also there: {', '.join(others)})" * bool(others)
        results.append(ok("communication back end", f"{backend}{also}"))
    else:
        remedy = f"ranks on {kind} need it; install the torch that your site recommends"
        results.append(wrong("communication back end", f"no {backend} in this torch", remedy))
    if facts["bf16"]:
        return [*results, ok("bf16", f"works on {kind}")]
    remedy = "set train.precision to fp16 or fp32"
    return [*results, warning("bf16", f"not supported by {name or kind}", remedy)]


def judge_deepspeed(version: str, fault: str) -> Result:
    """Result for a DeepSpeed of some version, or that cannot be imported for a reason."""
    wanted = required("deepspeed")
    only = "needed for train.backend: deepspeed alone"
    if fault:
        return warning("DeepSpeed", fault, f"pip install 'deepspeed{wanted}'; {only}")
    if not wanted.contains(version.partition("+")[0], prereleases=True):
        return warning("DeepSpeed", version, f"pip install 'deepspeed{wanted}'; {only}")
    return ok("DeepSpeed", version)


def check_mpi(launcher: Launcher) -> list[Result]:
    """Whether ranks of mpiexec can import mpi4py, and on which library, with the site's modules."""
    if launcher.name != "mpiexec":
        return []
    run = 'exec "$1" -c "$2"'
    answer = ask_in_job(launcher, run, sys.executable, _MPI, seconds=SECONDS)
    if answer.fault:
        remedy = "load the MPI of the launcher, then pip install --no-binary=mpi4py mpi4py"
        return [wrong("MPI", f"mpi4py: {answer.fault}", remedy)]
    return [ok("MPI", f"mpi4py {answer.output.strip().splitlines()[-1]}")]


def check_compiler() -> list[Result]:
    """The extension, which is compiled when tokamake is installed, and a compiler for others."""
    results = []
    try:
        import tokamake._csrc as extension

        results.append(ok("extension", str(extension.__file__)))
    except ImportError as error:
        remedy = "pip install tokamake again with this Python, where there is a g++"
        results.append(wrong("extension", str(error).splitlines()[0], remedy))
    if found := shutil.which("g++"):
        return [*results, ok("compiler", found)]
    remedy = "load a compiler's module or install g++; train.compile needs one"
    return [*results, warning("compiler", "no g++ found", remedy)]


def check_snakemake(executor: str) -> list[Result]:
    """Snakemake's version, and the package that starts jobs on this kind of cluster."""
    wanted = required("snakemake")
    try:
        version = metadata.version("snakemake")
    except metadata.PackageNotFoundError:
        return [wrong("snakemake", "not installed", f"pip install 'snakemake{wanted}'")]
    results = [ok("snakemake", version)]
    if version not in wanted:
        results = [wrong("snakemake", version, f"pip install 'snakemake{wanted}'")]
    if executor in ("local", "dryrun", "touch"):
        return results
    package = f"snakemake-executor-plugin-{executor}"
    if find_spec(package.replace("-", "_")) is None:
        return [*results, wrong("executor", f"no {package}", f"pip install {package}")]
    return [*results, ok("executor", executor)]


def check_limits(*, cluster: bool) -> list[Result]:
    """What a process may have: open files and, for networks of clusters, locked memory."""
    files, locked = map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    results = [judge_limit("open files", files, _OPEN_FILES, command="ulimit -n")]
    if not cluster:
        return results
    kibibytes = judge_limit("locked memory", locked, LOCKED_BYTES, command="ulimit -l", unit=1024)
    return [*results, kibibytes]


def judge_limit(
    name: str, limit: tuple[int, int], least: int, *, command: str, unit: int = 1
) -> Result:
    """Result for a limit of the system.

    Args:
        name: what is limited.
        limit: the one in force and its upper bound; `resource.RLIM_INFINITY` is none.
        least: what should be.
        command: of the shell, that changes it.
        unit: what the command counts in.
    """
    soft, hard = limit
    endless = resource.RLIM_INFINITY
    if soft == endless or soft >= least:
        return ok(name, "unlimited" if soft == endless else f"{soft:,}")
    if hard == endless or hard >= least:
        amount = "unlimited" if hard == endless else hard // unit
        return warning(name, f"{soft:,}", f"`{command} {amount}` in your shell's start-up file")
    remedy = f"{least:,} are wanted, which only your site can allow"
    return warning(name, f"{soft:,}", remedy)
