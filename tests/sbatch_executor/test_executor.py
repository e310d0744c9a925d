"""Snakemake with the Slurm executor: small jobs on a Slurm of this test's own."""

import sys
from pathlib import Path

import pytest

from tests.support.slurm_cluster import MISSING, slurm
from tests.support.snakemake_server import start

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"
    ),
]

SNAKEFILE = f"""
rule mistaken:
    output: "mistaken"
    shell: "echo >> mistakes; {sys.executable} -m tokamake merge none --output pair"

rule killed:
    output: "killed"
    shell: "echo >> kills; [ $(wc -l < kills) -gt 2 ] || kill -9 $$; touch {{output}}"

rule moved:
    output: "moved"
    shell:
        "echo $SLURMD_NODENAME >> nodes; touch {{output}}; [ $(wc -l < nodes) -gt 2 ] || "
        "{{{{ echo $SLURMD_NODENAME > $JOB_FAULTY_HOSTS_FILE; exit 1; }}}}"
"""


def test_mistakes_are_not_retried_signals_are_and_faulty_nodes_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    command = [
        "--executor", "sbatch", "--jobs", "5", "--retries", "2",
        "--keep-going", "--seconds-between-status-checks", "1", "--sbatch-patience", "5",
        "--sbatch-user-file", "none.yaml", "--default-resources", "runtime=5", "mem_mb=0",
        "--latency-wait", "10", "mistaken", "killed", "moved",
    ]  # fmt: skip
    with slurm() as cluster:
        run = start(command, tmp_path, cluster.environment)
        submitted = cluster.jobs("--states=all")
    assert run.returncode == 1
    assert (tmp_path / "killed").exists(), run.stderr
    assert (tmp_path / "kills").read_text().count("\n") == 3
    assert (tmp_path / "mistakes").read_text().count("\n") == 1
    assert len(submitted) == 7
    nodes = (tmp_path / "nodes").read_text().split()
    assert sorted(nodes) == ["n1", "n2", "n3"], run.stderr
    assert f"found hosts faulty: {nodes[1]}; its next jobs do not use them" in run.stderr
    assert "a retry would fail in the same way, so there is none" in run.stderr
