"""Folders and source files of the repository that tests use."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
SUPPORT = Path(__file__).parent
"""Helpers of the tests; some are programs of their own."""
REPLIES = SUPPORT / "pbs_replies"
"""Replies of a real PBS."""

PACKAGE = ROOT / "lib/tokamake"
MODULES = sorted(PACKAGE.rglob("*.py"))
EXECUTOR = sorted((ROOT / "lib").glob("snakemake_executor_plugin_*/**/*.py"))
RULES = "\n".join(path.read_text() for path in sorted((ROOT / "workflow").rglob("*.smk")))
SNAKEFILE = (ROOT / "workflow/Snakefile").read_text()


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else PACKAGE.parent))
