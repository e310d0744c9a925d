"""Marks of Snakemake at running jobs. A version that changes them fails by name."""

from pathlib import Path

import pytest

from tests.support.snakemake_server import start
from tokamake.status.snakemake_internals import batch_job, read_marks, started

LONG = "x" * 200
SNAKEFILE = f"""
rule all:
    output: "results/short", "results/{LONG}"
    shell:
        # Snakemake marks a job after it has started it.
        "until [ $(find .snakemake/incomplete -type f | wc -l) = 2 ]; do sleep 0.05; done;"
        "cp -r .snakemake/incomplete seen; cp -r .snakemake/locks locked; touch {{output}}"
"""

pytestmark = pytest.mark.usefixtures("snakemake_version")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory after Snakemake has ended; in `killed`, the marks of the running job."""
    folder = tmp_path_factory.mktemp("marks")
    (folder / "Snakefile").write_text(SNAKEFILE)
    start(["--cores", "1"], folder).check_returncode()
    (folder / "killed/.snakemake").mkdir(parents=True)
    (folder / "seen").rename(folder / "killed/.snakemake/incomplete")
    (folder / "locked").rename(folder / "killed/.snakemake/locks")
    return folder


def test_read_marks(ended: Path) -> None:
    assert read_marks(ended) == (None, {})
    begun, outputs = read_marks(ended / "killed")
    assert {"results/short", f"results/{LONG}"} <= outputs.keys()
    assert begun == started(ended / "killed")


def test_batch_job(ended: Path) -> None:
    marker = read_marks(ended / "killed").running["results/short"]
    assert batch_job(marker) == ""  # a job of this machine
    assert "external_jobid" in marker.read_text()
    marker.write_text('{"external_jobid": "4711.pbs"}')
    assert batch_job(marker) == "4711.pbs"


def test_started(ended: Path) -> None:
    assert started(ended) is None
    snakefile = (ended / "Snakefile").stat().st_mtime
    locked = started(ended / "killed")
    assert locked is not None
    assert locked >= snakefile
