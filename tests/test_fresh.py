"""The test on fresh Debian machines: when it is refused, and that it does what the README says."""

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FRESH = ROOT / ".ci/fresh"


@pytest.mark.parametrize("script", sorted((ROOT / ".ci").iterdir()), ids=lambda path: path.name)
def test_scripts_are_programs_of_bash(script: Path) -> None:
    assert os.access(script, os.X_OK)
    process = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def run(folder: Path, user: int, *programs: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user who has no programs but these and those that it begins with."""
    for name in ("bash", "dirname", "realpath", "mkdir", "flock"):
        path = shutil.which(name)
        assert path
        (folder / name).symlink_to(path)
    for name, does in (("id", f"echo {user}"), *((each, "exit 1") for each in programs)):
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": str(folder), "FRESH": str(folder / "fresh"), "FRESH_MOUNTS": "own"}
    command = [str(FRESH), "bookworm"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (1000, "it needs root, to install Debian into a folder and to work there"),
        (0, "no debootstrap; apt-get install debootstrap"),
    ],
)
def test_it_is_refused_with_a_reason(tmp_path: Path, user: int, message: str) -> None:
    process = run(tmp_path, user)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"test-fresh: {message}\n"
    assert not (tmp_path / "fresh").exists()


def test_two_runs_do_not_share_a_machine(tmp_path: Path) -> None:
    lock = tmp_path / "fresh/bookworm.lock"
    lock.parent.mkdir()
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        process = run(tmp_path, 0, "debootstrap")
    assert process.returncode == 1
    assert process.stderr.startswith(
        f"test-fresh: {tmp_path}/fresh/bookworm: another run is using it"
    )


def test_the_failing_release_is_named(tmp_path: Path) -> None:
    process = run(tmp_path, 0, "debootstrap", "cat", "rm", "apt-get", "sed", "sort")
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "test-fresh: bookworm: failed after 0 minutes"


def test_it_installs_the_packages_of_the_readme() -> None:
    (packages,) = re.findall(r"^packages=\((.*)\)$", FRESH.read_text(), re.MULTILINE)
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"apt-get install (python3 .*)", readme) == [packages]


def test_parts_of_both_commands_can_be_asked_for() -> None:
    steps = '--config "train={train_steps: 30}"'
    for target, variable, value in (
        ("train", "SNAKEMAKE_ARGS", steps),
        ("test", "PYTEST_ARGS", '-m "not slow and not ranks and not grid"'),
    ):
        command = ["make", "--dry-run", "--directory", ROOT, target, f"{variable}={value}"]
        printed = subprocess.check_output(command, text=True)
        assert value in printed
        # In quotes of the script's own.
        assert f'{variable}="{value}"' in FRESH.read_text().replace('\\"', '"')
        assert f"{variable}='{value}'" in (ROOT / "README.md").read_text()
