"""A start has its own folder, variables, output and exit status, as a process of its own has."""

import os
from pathlib import Path

import pytest

from tests.support.snakemake_server import start

SNAKEFILE = """
import os, sys
print(os.environ["KIND"], os.getcwd(), file=sys.stderr)
rule all:
    output: "a.txt"
    shell: "{}"
"""


@pytest.mark.parametrize("command", ["touch {output}", "exit 1"])
def test_a_start_is_like_a_process_of_its_own(tmp_path: Path, command: str) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE.replace("{}", command))
    done = start(["--cores", "1"], tmp_path, {**os.environ, "KIND": "first"})
    assert done.returncode == ("exit" in command)
    assert f"first {tmp_path}\n" in done.stderr
    assert (tmp_path / "a.txt").exists() == (done.returncode == 0)
    other = start(["--cores", "1", "--dry-run"], tmp_path, {**os.environ, "KIND": "second"})
    assert other.returncode == 0
    assert f"second {tmp_path}\n" in other.stderr
