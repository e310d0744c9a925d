"""The test on fresh Debian machines: when it is skipped, and that it does what the README says."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRESH = ROOT / ".ci/fresh"


@pytest.mark.parametrize("script", sorted((ROOT / ".ci").iterdir()), ids=lambda path: path.name)
def test_scripts_are_programs_of_bash(script: Path) -> None:
    assert os.access(script, os.X_OK)
    found = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (1000, "it needs root, to install Debian into a folder and to work there"),
        (0, "no debootstrap; apt-get install debootstrap"),
    ],
)
def test_it_is_skipped_with_a_reason(tmp_path: Path, user: int, message: str) -> None:
    # Of all programs, those alone that it needs to find out.
    for name in ("bash", "dirname", "realpath"):
        (found,) = subprocess.check_output(["which", name], text=True).splitlines()[:1]
        (tmp_path / name).symlink_to(found)
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (tmp_path / "id").chmod(0o755)
    environment = {"PATH": str(tmp_path), "FRESH": str(tmp_path / "fresh")}
    found = subprocess.run([FRESH], env=environment, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == f"test-fresh: skipped: {message}\n"
    assert not (tmp_path / "fresh").exists()


def test_it_installs_what_the_readme_asks_for() -> None:
    (packages,) = re.findall(r"^packages=\((.*)\)$", FRESH.read_text(), re.MULTILINE)
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"apt-get install (python3 .*)", readme) == [packages]


def test_parts_of_both_commands_can_be_asked_for() -> None:
    steps = '--config "train={train_steps: 30}"'
    for target, variable, value in (
        ("train", "SNAKEMAKE_ARGS", steps),
        ("test", "PYTEST_ARGS", '-m "not slow and not ranks"'),
    ):
        command = ["make", "--dry-run", "--directory", ROOT, target, f"{variable}={value}"]
        printed = subprocess.check_output(command, text=True)
        assert value in printed
        # In quotes of the script's own.
        assert f'{variable}="{value}"' in FRESH.read_text().replace('\\"', '"')
        assert f"{variable}='{value}'" in (ROOT / "README.md").read_text()
