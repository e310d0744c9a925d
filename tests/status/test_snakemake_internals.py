"""Marks of Snakemake at running jobs. A version that changes them fails by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from tokamake.status.snakemake_internals import running_outputs

LONG = "x" * 200
SNAKEFILE = f"""
rule all:
    output: "results/short", "results/{LONG}"
    shell:
        # Snakemake marks a job after it has started it.
        "until [ $(find .snakemake/incomplete -type f | wc -l) = 2 ]; do sleep 0.05; done;"
        "cp -r .snakemake/incomplete seen; touch {{output}}"
"""

pytestmark = pytest.mark.usefixtures("snakemake_version")


def test_running_outputs(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    command = [sys.executable, "-m", "snakemake", "--cores", "1"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=60)
    assert running_outputs(tmp_path) == set()
    (tmp_path / "killed/.snakemake").mkdir(parents=True)
    (tmp_path / "seen").rename(tmp_path / "killed/.snakemake/incomplete")
    outputs = running_outputs(tmp_path / "killed")
    assert {"results/short", f"results/{LONG}"} <= outputs
