"""Source files of the library and the workflow, for the laws of the house."""

from pathlib import Path

from tests.support.paths import ROOT

PACKAGE = ROOT / "lib/tokamake"
MODULES = sorted(PACKAGE.rglob("*.py"))
EXECUTOR = sorted((ROOT / "lib").glob("snakemake_executor_plugin_*/**/*.py"))
RULES = "\n".join(path.read_text() for path in sorted((ROOT / "workflow").rglob("*.smk")))
SNAKEFILE = (ROOT / "workflow/Snakefile").read_text()


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else PACKAGE.parent))
