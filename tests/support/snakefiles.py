"""Small Snakefiles that use the private names of Snakemake."""

import subprocess
from pathlib import Path

from tests.support.snakemake_server import start

HEAD = """
from tokamake.workflow.snakemake_internals import Snakemake
SNAKEMAKE = Snakemake(workflow)
"""


def run(
    folder: Path, snakefile: str, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    (folder / "Snakefile").write_text(HEAD + snakefile)
    return start(["--cores", "1", *arguments], folder, environment)
