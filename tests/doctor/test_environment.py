"""Checks of Python, torch, DeepSpeed, MPI, the compiler, Snakemake and limits."""

import os
import resource
import sys
from pathlib import Path

import pytest

from tests.doctor.conftest import read, states
from tests.support.runs import MPI
from tokamake.doctor import environment
from tokamake.doctor.launcher import Launcher
from tokamake.doctor.result import Result

FACTS = {
    "torch": "2.10.0+cpu", "device": "cpu", "devices": 0, "name": "", "backends": ["gloo"],
    "bf16": True, "seen": "",
}  # fmt: skip

CUDA = {
    **FACTS, "device": "cuda", "devices": 4, "name": "A100", "backends": ["gloo", "nccl"],
}  # fmt: skip


def test_an_old_python_and_the_environment_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (result,) = environment.check_python()
    assert result.state == "ok"
    assert sys.executable in result.value
    monkeypatch.setattr(environment.os, "getuid", lambda: 12345)
    monkeypatch.setattr(environment, "_owner", lambda _: "alice")
    os.chown(tmp_path, 4321, -1) if os.geteuid() == 0 else pytest.skip("needs root")
    (result,) = environment.check_python(tmp_path)
    assert result.state == "warning"
    assert "an environment of alice" in result.value
    assert "An environment of your own" in result.remedy
    monkeypatch.setattr(environment.platform, "python_version", lambda: "3.9.1")
    assert environment.check_python()[0].state == "wrong"


def test_torch_device_and_communication_back_end() -> None:
    results = environment.torch_results(FACTS, {})
    assert set(states(results).values()) == {"ok"}
    results = environment.torch_results(CUDA, {})
    assert "ok       device: cuda, 4 × A100" in [result.line for result in results]
    assert "ok       communication back end: nccl (also available: gloo)" in [
        result.line for result in results
    ]
    old = environment.torch_results({**FACTS, "torch": "2.3.1"}, {})
    assert states(old)["torch"] == "warning"
    deaf = environment.torch_results({**CUDA, "backends": ["gloo"]}, {})
    assert states(deaf)["communication back end"] == "wrong"
    assert states(environment.torch_results({**CUDA, "bf16": False}, {}))["bf16"] == "warning"
    blind = {**FACTS, "seen": "an NVIDIA GPU"}
    assert states(environment.torch_results(blind, {}))["device"] == "warning"
    hidden = environment.torch_results(blind, {"CUDA_VISIBLE_DEVICES": ""})
    assert states(hidden)["device"] == "ok"


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_TORCH", "import torch_of_the_site")
    (result,) = environment.check_torch()
    assert result.state == "wrong"
    assert "No module named 'torch_of_the_site'" in result.value


def test_an_old_or_broken_deepspeed_is_reported() -> None:
    assert environment.deepspeed_result("0.19.2", "").state == "ok"
    for version, fault in (("0.12.0", ""), ("", "ImportError: no libaio")):
        result = environment.deepspeed_result(version, fault)
        assert result.state == "warning"
        assert "pip install 'deepspeed" in result.remedy


def test_the_environment_of_these_tests_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", MPI)
    results = [*environment.check_torch(), *environment.check_mpi(Launcher("mpiexec"))]
    assert {"torch", "bf16", "DeepSpeed", "MPI"} <= set(states(results))
    assert set(states(results).values()) == {"ok"}


def test_only_mpiexec_needs_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_MPI", "raise ImportError('libmpi.so.12: not result')")
    assert environment.check_mpi(Launcher("srun")) == []
    (result,) = environment.check_mpi(Launcher("mpiexec"))
    assert result.state == "wrong"
    assert "libmpi.so.12" in result.value


def test_mpi_is_from_the_modules_that_the_launch_script_loads(site: Path) -> None:
    for library, state in ((site / "none.so", "wrong"), (MPI, "ok")):
        text = f"echo loading\nexport MPI4PY_LIBMPI={library}\nmpiexec=\n"
        (site / "site/environment.sh").write_text(text)
        (result,) = environment.check_mpi(read(site).launcher)
        assert result.state == state
    assert result.value.startswith("mpi4py 4")
    assert "MPICH" in result.value


def test_a_missing_compiler_or_extension_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(environment.check_compiler())["extension"] == "ok"
    monkeypatch.setenv("PATH", "/nowhere")
    assert states(environment.check_compiler())["compiler"] == "warning"
    monkeypatch.setitem(sys.modules, "tokamake._csrc", None)
    assert states(environment.check_compiler())["extension"] == "wrong"


def test_an_old_snakemake_or_a_missing_executor_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert states(environment.check_snakemake("local")) == {"snakemake": "ok"}
    assert states(environment.check_snakemake("pbs"))["executor"] == "ok"
    missing = environment.check_snakemake("no-such")
    assert missing[-1].remedy == "pip install snakemake-executor-plugin-no-such"
    with monkeypatch.context() as without:
        without.setattr(environment, "find_spec", lambda _: None)
        missing = environment.check_snakemake("sbatch")
    assert missing[-1].remedy == (
        "pip install lib/snakemake_executor_plugin_pbs lib/snakemake_executor_plugin_sbatch"
    )
    monkeypatch.setattr(environment.metadata, "version", lambda _: "7.32.4")
    assert states(environment.check_snakemake("local")) == {"snakemake": "wrong"}


def test_limits_of_the_system() -> None:
    endless, name = resource.RLIM_INFINITY, "locked memory"

    def checked(*limit: int) -> Result:
        return environment.limit_result(name, limit, minimum=2**26, command="ulimit -l", unit=1024)

    assert checked(endless, endless).line == "ok       locked memory: unlimited"
    assert checked(2**30, 2**30).state == "ok"
    assert "`ulimit -l unlimited`" in checked(65536, endless).remedy
    assert "`ulimit -l 1048576`" in checked(65536, 2**30).remedy
    assert "only your site" in checked(65536, 65536).remedy
    assert len(environment.check_limits(cluster=True)) == 2
    assert len(environment.check_limits(cluster=False)) == 1
