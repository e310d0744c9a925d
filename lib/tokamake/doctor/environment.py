"""Checks of Python, torch, DeepSpeed, MPI, compiler, Snakemake and system limits.

A separate process imports packages that are slow or that can crash or hang.
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

from packaging.specifiers import SpecifierSet

from tokamake.doctor.launcher import SECONDS, Launcher, ask_in_job
from tokamake.doctor.programs import ask_python
from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.runtime.device import accelerators
from tokamake.runtime.device_types import DEVICE_TYPES
from tokamake.runtime.requirements import required

RECIPE = "see `An environment of your own` in the README of the profiles"

_OWN_EXECUTORS = {
    "pbs": "lib/snakemake_executor_plugin_pbs",
    "sbatch": "lib/snakemake_executor_plugin_pbs lib/snakemake_executor_plugin_sbatch",
}
"""Executors of this repository, which the package index does not have, and their folders."""
_OPEN_FILES = 1024
LOCKED_BYTES = 2**26

_TORCH = """
import json, sys
from tokamake.doctor.environment import torch_facts
report = {"torch": torch_facts()}
try:
    import deepspeed
    report["deepspeed"] = deepspeed.__version__
except Exception as error:
    report["fault"] = f"{type(error).__name__}: {error}".splitlines()[0]
sys.stdout.write("\\n" + json.dumps(report))
"""
_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__ + ", " + MPI.Get_library_version().strip(" \\0\\n").splitlines()[0])
"""


def check_python(folder: Path = Path(sys.prefix)) -> list[Result]:
    """Check the version of Python and the owner of its environment."""
    supported = metadata.metadata("tokamake")["Requires-Python"]
    version, value = platform.python_version(), f"{platform.python_version()}, {sys.executable}"
    if version not in SpecifierSet(supported):
        return [wrong("Python", value, f"tokamake needs {supported}; {RECIPE}")]
    if folder.stat().st_uid not in (os.getuid(), 0):
        remedy = f"its owner can change it during a run; {RECIPE}"
        return [warning("Python", f"{value}, in an environment of {_owner(folder)}", remedy)]
    return [ok("Python", value)]


def _owner(folder: Path) -> str:
    try:
        return folder.owner()
    except KeyError:
        return f"user {folder.stat().st_uid}"


def check_torch() -> list[Result]:
    """Check torch, DeepSpeed, device, communication back end and bf16 in a new process."""
    answer = ask_python(_TORCH, seconds=SECONDS)
    if answer.fault:
        return [wrong("torch", answer.fault, f"install the torch of your site; {RECIPE}")]
    # Imports may print to stdout before the last line.
    facts = json.loads(answer.output.splitlines()[-1])
    version, fault = facts.get("deepspeed", ""), facts.get("fault", "")
    return [*torch_results(facts["torch"], os.environ), deepspeed_result(version, fault)]


def torch_facts() -> dict[str, Any]:
    """Import torch and query it.

    Returns:
        torch: version. device: cpu, cuda or xpu, as the trainer chooses. devices: number of
        devices, 0 for a CPU. name: name of the first device. backends: available back ends of
        torch.distributed. bf16: whether the device supports it. seen: accelerator detected without
        torch, or empty.
    """
    import torch
    import torch.distributed as dist

    kind, module = next(accelerators(), ("cpu", torch.cpu))
    return {
        "torch": str(torch.__version__),
        "device": kind,
        "devices": module.device_count() if kind != "cpu" else 0,
        "name": module.get_device_name(0) if kind != "cpu" else "",
        "backends": [name for name in ("gloo", "nccl", "xccl", "mpi") if _has_backend(dist, name)],
        "bf16": bool(module.is_bf16_supported()) if kind != "cpu" else True,
        "seen": _accelerator(),
    }


def _has_backend(dist: Any, backend: str) -> bool:
    available = getattr(dist, f"is_{backend}_available", None)
    return available is not None and bool(available())


def _accelerator() -> str:
    if Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return "an NVIDIA GPU"
    return "an Intel GPU" if shutil.which("xpu-smi") and Path("/dev/dri").exists() else ""


def torch_results(facts: Mapping[str, Any], environment: Mapping[str, str]) -> list[Result]:
    """Return the results for the facts of `torch_facts`."""
    supported, kind = required("torch"), facts["device"]
    backend = DEVICE_TYPES[kind].backend
    results = [ok("torch", facts["torch"])]
    if not supported.contains(facts["torch"].partition("+")[0], prereleases=True):
        remedy = f"tokamake is tested with {supported}; {RECIPE}"
        results = [warning("torch", facts["torch"], remedy)]
    count, name = facts["devices"], facts["name"]
    value = f"{kind}, {count} × {name}" if count else kind
    hidden = environment.get("CUDA_VISIBLE_DEVICES") == ""
    if facts["seen"] and not count and not hidden:
        remedy = "this torch cannot use it; install the torch that your site recommends"
        results.append(
            warning("device", f"{value}, although the machine has {facts['seen']}", remedy)
        )
    else:
        results.append(ok("device", value))
    if backend in facts["backends"]:
        alternatives = [name for name in facts["backends"] if name != backend]
        suffix = f" (also available: {', '.join(alternatives)})" * bool(alternatives)
        results.append(ok("communication back end", f"{backend}{suffix}"))
    else:
        remedy = f"ranks on {kind} need it; install the torch that your site recommends"
        results.append(wrong("communication back end", f"no {backend} in this torch", remedy))
    if facts["bf16"]:
        return [*results, ok("bf16", f"works on {kind}")]
    remedy = "set train.precision to fp16 or fp32"
    return [*results, warning("bf16", f"not supported by {name or kind}", remedy)]


def deepspeed_result(version: str, fault: str) -> Result:
    """Return the result for a DeepSpeed version, or for the `fault` of its import."""
    supported = required("deepspeed")
    remedy = f"pip install 'deepspeed{supported}'; needed only for train.backend: deepspeed"
    if fault:
        return warning("DeepSpeed", fault, remedy)
    if not supported.contains(version.partition("+")[0], prereleases=True):
        return warning("DeepSpeed", version, remedy)
    return ok("DeepSpeed", version)


def check_mpi(launcher: Launcher) -> list[Result]:
    """Check that ranks of mpiexec can import mpi4py with the site's modules."""
    if launcher.name != "mpiexec":
        return []
    run = 'exec "$1" -c "$2"'
    answer = ask_in_job(launcher, run, sys.executable, _MPI, seconds=SECONDS)
    if answer.fault:
        remedy = "load the MPI of the launcher, then pip install --no-binary=mpi4py mpi4py"
        return [wrong("MPI", f"mpi4py: {answer.fault}", remedy)]
    return [ok("MPI", f"mpi4py {answer.output.strip().splitlines()[-1]}")]


def check_compiler() -> list[Result]:
    """Check the compiled extension of tokamake, and a compiler for torch.compile."""
    results = []
    try:
        import tokamake._csrc as extension

        results.append(ok("extension", str(extension.__file__)))
    except ImportError as error:
        remedy = "reinstall tokamake with this Python on a machine with g++"
        results.append(wrong("extension", str(error).splitlines()[0], remedy))
    if path := shutil.which("g++"):
        return [*results, ok("compiler", path)]
    remedy = "load the module of a compiler or install g++; train.compile needs it"
    return [*results, warning("compiler", "no g++ found", remedy)]


def check_snakemake(executor: str) -> list[Result]:
    """Check the version of Snakemake and the executor plugin for this kind of cluster."""
    supported = required("snakemake")
    try:
        version = metadata.version("snakemake")
    except metadata.PackageNotFoundError:
        return [wrong("snakemake", "not installed", f"pip install 'snakemake{supported}'")]
    results = [ok("snakemake", version)]
    if version not in supported:
        results = [wrong("snakemake", version, f"pip install 'snakemake{supported}'")]
    if executor in ("local", "dryrun", "touch"):
        return results
    package = f"snakemake-executor-plugin-{executor}"
    if find_spec(package.replace("-", "_")) is None:
        remedy = f"pip install {_OWN_EXECUTORS.get(executor, package)}"
        return [*results, wrong("executor", f"no {package}", remedy)]
    return [*results, ok("executor", executor)]


def check_limits(*, cluster: bool) -> list[Result]:
    """Check limits of open files and, on clusters, of locked memory, which networks need."""
    files, locked = map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    results = [limit_result("open files", files, minimum=_OPEN_FILES, command="ulimit -n")]
    if not cluster:
        return results
    kibibytes = limit_result(
        "locked memory", locked, minimum=LOCKED_BYTES, command="ulimit -l", unit=1024
    )
    return [*results, kibibytes]


def limit_result(
    name: str, limit: tuple[int, int], *, minimum: int, command: str, unit: int = 1
) -> Result:
    """Return the result for a soft and hard limit; `unit`: of the command's argument."""
    soft, hard = limit
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= minimum:
        return ok(name, "unlimited" if soft == unlimited else f"{soft:,}")
    if hard == unlimited or hard >= minimum:
        amount = "unlimited" if hard == unlimited else hard // unit
        return warning(name, f"{soft:,}", f"add `{command} {amount}` to your shell's start-up file")
    remedy = f"{minimum:,} is recommended; only your site can raise the limit"
    return warning(name, f"{soft:,}", remedy)
