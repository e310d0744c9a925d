"""Documentation: links resolve, references match the code, commands of the tutorial work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("profiles/*.md"),
        *ROOT.glob("config/*.md"),
        *ROOT.glob("lib/*/*.md"),
    ]
)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shell_blocks(page: str) -> list[str]:
    """Shell commands of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [code for language, code in BLOCK.findall(text) if language == "sh"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_name_existing_files(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{name_of(page)}: {target}"


def test_the_readme_is_short_and_begins_with_a_command() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert "```sh" in lines[:25]


def test_generated_reference_pages_match_the_code(tmp_path: Path) -> None:
    copy = Path(shutil.copy(ROOT / "docs/generate.py", tmp_path))
    subprocess.run([sys.executable, copy], check=True)
    for page in (tmp_path / "reference").iterdir():
        committed = (ROOT / "docs/reference" / page.name).read_text(encoding="utf-8")
        assert page.read_text(encoding="utf-8") == committed, "run: make docs"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder that has what commands of the documentation use."""
    for name in ("workflow", "profiles", "config"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_blocks(blocks: list[str], folder: Path) -> None:
    """Run shell commands of a page one after the other, as a reader would."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
    }
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.grid
@pytest.mark.slow
def test_commands_of_the_tutorial_work(repository: Path) -> None:
    run_blocks(shell_blocks("docs/tutorial.md"), repository)
    assert (repository / "results/mine/export/model.safetensors").exists()
    assert (repository / "results/report.html").exists()
